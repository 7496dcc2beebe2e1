package main

import "context"

// stories lists the stories of the demo. independent, chained and hung are the three standard scenarios of thread
// locks.
func stories() []story {
	return []story{onboardingStory(), independentStory(), chainedStory(), hungStory()}
}

// starts returns an action that starts a flow.
func starts(flow string, input any) func(context.Context, *storyPlayer) error {
	return func(ctx context.Context, s *storyPlayer) error { return s.startFlow(ctx, flow, input) }
}

// writes returns an action that sends a chat message as the candidate.
func writes(words string) func(context.Context, *storyPlayer) error {
	return func(ctx context.Context, s *storyPlayer) error { return s.client.sendChat(ctx, s.story.thread, words) }
}

func independentStory() story {
	return story{
		Name: "independent", About: "Two agents speak with Juan at once: the second one's message waits until the first is " +
			"done",
		thread: "juan", participant: "Juan", begins: 14 * 60,
		scenes: []storyStep{
			{0, starts("agente_a", nil), []string{
				"agente_a acquired",
				"agente_a said: Necesito tus documentos",
				"agente_a waits event",
			}},
			{1, starts("agente_b", nil), []string{
				"agente_b queued agente_a: Ahora tienes una evaluación pendiente",
				"agente_b ended: completed",
			}},
			{2, func(ctx context.Context, s *storyPlayer) error {
				return s.raiseEvent(ctx, "a system", "tells agente_a that its work is done", "EVENT_COMPLETED", "trabajo "+
					s.runs["agente_a"], nil)
			}, []string{
				"agente_a ended: completed",
				"agente_a released",
				"agente_b said: Ahora tienes una evaluación pendiente",
			}},
		},
		ends: []string{"1 agente_a: Necesito tus documentos", "2 agente_b: Ahora tienes una evaluación pendiente"},
	}
}

func chainedStory() story {
	return story{
		Name: "chained", About: "A coordinator waits for its collector, which inherits the thread with María and gives it " +
			"back",
		thread: "maria", participant: "María", begins: 14 * 60,
		scenes: []storyStep{
			{0, func(ctx context.Context, s *storyPlayer) error {
				return s.startFlow(ctx, "coordinador_encadenado", map[string]string{
					"pausa": s.minute.String(), "pausa_del_recolector": (4 * s.minute).String(),
				})
			}, []string{"coordinador acquired", "coordinador said: Iniciamos tu proceso"}},
			{1, nil, []string{
				"coordinador triggers recolector",
				"recolector inherited coordinador",
				"recolector said: Necesito tu INE",
			}},
			{5, nil, []string{"recolector waits response"}},
			{30, writes("Aquí está mi INE"), []string{
				"María said: Aquí está mi INE",
				"recolector said: Documento recibido",
				"recolector ended: completed",
				"recolector returned coordinador",
				"coordinador said: Siguiente paso...",
				"coordinador ended: completed",
				"coordinador released",
			}},
		},
		ends: []string{
			"1 coordinador: Iniciamos tu proceso", "2 recolector: Necesito tu INE", "3 María: Aquí está mi INE",
			"4 recolector: Documento recibido", "5 coordinador: Siguiente paso...",
		},
	}
}

func hungStory() story {
	return story{
		Name: "hung", About: "An agent lives but stays silent: after ten minutes another agent may use Pedro's thread",
		thread: "pedro", participant: "Pedro", begins: 14 * 60, idle: 10,
		scenes: []storyStep{
			{0, func(ctx context.Context, s *storyPlayer) error {
				if err := s.startFlow(ctx, "external:agente_a", nil); err != nil {
					return err
				}
				if err := s.lockExecution(ctx, "agente_a"); err != nil {
					return err
				}
				return s.sendMessage(ctx, "agente_a", "Necesito tus documentos")
			}, []string{"agente_a acquired", "agente_a said: Necesito tus documentos"}},
			{1, func(ctx context.Context, s *storyPlayer) error {
				return s.heartbeat(ctx, "agente_a", "hangs: it beats, and says nothing more")
			}, nil},
			{10, func(ctx context.Context, s *storyPlayer) error {
				if err := s.waitUntilStale(ctx); err != nil {
					return err
				}
				s.showAction("the thread", "is stale: nothing was said for 10 minutes")
				return s.heartbeat(ctx, "agente_a", "still beats, and does not know")
			}, nil},
			{11, starts("agente_b", nil), []string{
				"agente_a stale",
				"agente_b acquired",
				"agente_b said: Ahora tienes una evaluación pendiente",
				"agente_b ended: completed",
				"agente_b released",
			}},
		},
		ends: []string{"1 agente_a: Necesito tus documentos", "2 agente_b: Ahora tienes una evaluación pendiente"},
	}
}

func onboardingStory() story {
	return story{
		Name: "onboarding", About: "A coordinator and its agents take María from the welcome to her contract",
		thread: "maria", participant: "María", begins: 10 * 60,
		scenes: []storyStep{
			{0, starts("coordinador", map[string]any{"nombre": "María"}), []string{
				"coordinador acquired",
				"coordinador said: ¡Hola, María! Iniciamos tu proceso. ¿Empezamos?",
				"coordinador waits response",
			}},
			{1, writes("Sí, empecemos"), []string{
				"María said: Sí, empecemos",
				"coordinador triggers recolector",
				"recolector inherited coordinador",
				"recolector said: Necesito tus documentos: INE, CURP (solicitud …).",
				"recolector waits document",
			}},
			{3, uploads("INE", "https://example.com/maria/ine.pdf"), nil},
			{4, uploads("CURP", "https://example.com/maria/curp.pdf"), []string{
				"recolector said: Documentos recibidos. ¡Gracias!",
				"recolector ended: completed",
				"recolector returned coordinador",
				"coordinador said: Siguiente paso: tu evaluación.",
				"coordinador triggers evaluacion",
				"evaluacion inherited coordinador",
				"evaluacion said: Tienes una evaluación de 30 preguntas (solicitud …).",
				"evaluacion waits test",
			}},
			{
				7, answers("finishes the test with 86 points", "TEST_COMPLETED", map[string]any{"score": 86, "result": "aprobada"}),
				[]string{
					"evaluacion ended: completed",
					"evaluacion returned coordinador",
					"coordinador said: ¡Felicidades, María! Obtuviste 86 puntos. Por favor firma tu contrato (solicitud …).",
					"coordinador waits signature",
				},
			},
			{9, answers("signs the contract", "SIGNATURE_COMPLETED",
				map[string]any{"url": "https://example.com/maria/contrato.pdf"}), []string{
				"coordinador said: Contrato firmado. ¡Te damos la bienvenida al equipo!",
				"coordinador ended: completed",
				"coordinador released",
			}},
		},
		ends: []string{
			"1 coordinador: ¡Hola, María! Iniciamos tu proceso. ¿Empezamos?", "2 María: Sí, empecemos",
			"3 recolector: Necesito tus documentos: INE, CURP (solicitud …).", "4 recolector: Documentos recibidos. ¡Gracias!",
			"5 coordinador: Siguiente paso: tu evaluación.",
			"6 evaluacion: Tienes una evaluación de 30 preguntas (solicitud …).",
			"7 coordinador: ¡Felicidades, María! Obtuviste 86 puntos. Por favor firma tu contrato (solicitud …).",
			"8 coordinador: Contrato firmado. ¡Te damos la bienvenida al equipo!",
		},
	}
}

// uploads returns an action that delivers one requested document.
func uploads(document, address string) func(context.Context, *storyPlayer) error {
	return answers("uploads her "+document, "DOCUMENT_UPLOADED", map[string]string{"document": document, "url": address})
}

// answers returns an action that answers the last request with an event.
func answers(what, event string, data any) func(context.Context, *storyPlayer) error {
	return func(ctx context.Context, s *storyPlayer) error {
		id, err := s.requestID()
		if err != nil {
			return err
		}
		return s.raiseEvent(ctx, s.story.participant, what, event, id, data)
	}
}
