package offline

// phrases are the fixed sentences in one language.
type phrases struct {
	hello, about, may, none    string // who speaks, and with which tools
	welcome                    string
	can, onlyOrdered, canSay   string // help
	found, nothingFound        string
	nothingRan, recorded       string
	failure, denial, waits     string
	cut, of                    string
	needs, noTool, notOffered  string
	kept, forgotten, notKept   string
	noMemory, manyMemories     string
	call, calls, thing, things string
}

func (s situation) phrases() phrases {
	if s.inSpanish() {
		return spanish()
	}
	return english()
}

func english() phrases {
	return phrases{
		hello: "Hello! ",
		about: "I am the offline model: I plan tool calls by rules that compare words, and understand no language. ",
		may: "I may call %s; ask about what they are for, say help to see what each does, or set OPENAI_API_KEY or OPENAI_BASE_URL " +
			"for a real model.",
		none:    "No tools were offered, so there is nothing I can find out. Set OPENAI_API_KEY or OPENAI_BASE_URL for a real model.",
		welcome: "You are welcome.",
		can:     "I am the offline model, rules without a language model. These are the tools that I may call:", onlyOrdered: " (when ordered)",
		canSay: "Ask about what they look at, or order one: run NAME, or use NAME with {\"argument\": \"value\"}.",
		found:  "Found with %s: %s.", nothingFound: "Nothing was found; %s failed.", nothingRan: "Nothing was done; %s awaiting approval.",
		recorded: "Recorded %s: %s.",
		failure:  "failed, %s", denial: "%s was denied and has not run: %s", waits: "%s has not run yet: it awaits an administrator's approval (%s)",
		cut: " (only %s bytes of the result were read)", of: " of ",
		needs: "%s was not called, because I do not make up arguments. Write: use %[1]s with {…}; it needs %s.", noTool: "There is no tool %s among those that I may call, so it was not called.",
		notOffered: "I cannot do that here: %s is not among the tools that I may call.",
		kept:       "Remembered as %s / %s.", forgotten: "Forgotten: %s / %s.", notKept: "There was nothing to forget under %s / %s.",
		noMemory: "I found no memory of %q, so nothing was forgotten.", manyMemories: "Nothing was forgotten: more than one memory may be meant by %q. Say which: %s.",
		call: "tool call", calls: "tool calls", thing: "thing", things: "things",
	}
}

func spanish() phrases {
	return phrases{
		hello: "¡Hola! ",
		about: "Soy el modelo sin conexión: planifico llamadas a herramientas con reglas que comparan palabras, y no entiendo el lenguaje. ",
		may: "Puedo llamar a %s; pregunta por lo que miran, di ayuda para ver qué hace cada una, o define OPENAI_API_KEY u " +
			"OPENAI_BASE_URL para usar un modelo de verdad.",
		none:    "No se me ofreció ninguna herramienta, así que no puedo averiguar nada. Define OPENAI_API_KEY u OPENAI_BASE_URL para usar un modelo de verdad.",
		welcome: "De nada.",
		can:     "Soy el modelo sin conexión, reglas sin modelo de lenguaje. Estas son las herramientas que puedo llamar:", onlyOrdered: " (si se ordena)",
		canSay: "Pregunta por lo que miran, u ordena una: ejecuta NOMBRE, o usa NOMBRE con {\"argumento\": \"valor\"}.",
		found:  "Encontrado con %s: %s.", nothingFound: "No se encontró nada; %s sin éxito.", nothingRan: "No se hizo nada; %s a la espera de aprobación.",
		recorded: "Anotado %s: %s.",
		failure:  "falló, %s", denial: "%s fue denegado y no se ejecutó: %s", waits: "%s aún no se ejecutó: espera la aprobación de un administrador (%s)",
		cut: " (solo se leyeron %s bytes del resultado)", of: " de ",
		needs: "No llamé a %s, porque no invento argumentos. Escribe: usa %[1]s con {…}; necesita %s.", noTool: "No hay ninguna herramienta %s entre las que puedo llamar, así que no la llamé.",
		notOffered: "Aquí no puedo: %s no está entre las herramientas que puedo llamar.",
		kept:       "Recordado como %s / %s.", forgotten: "Olvidado: %s / %s.", notKept: "No había nada que olvidar en %s / %s.",
		noMemory: "No encontré ningún recuerdo de %q, así que no olvidé nada.", manyMemories: "No olvidé nada: %q puede referirse a más de un recuerdo. Di cuál: %s.",
		call: "llamada", calls: "llamadas", thing: "cosa", things: "cosas",
	}
}
