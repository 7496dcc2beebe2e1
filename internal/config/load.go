package config

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"strings"

	"github.com/caarlos0/env/v11"
)

// Error is everything that is wrong with the settings, one line for each.
type Error struct{ Problems []string }

// Error is the lines.
func (e *Error) Error() string { return strings.Join(e.Problems, "\n") }

// Setting describes one variable.
type Setting struct {
	Name    string
	Default string
	Help    string
	Secret  bool
}

// LogValue hides the text from logs.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// Environ turns what os.Environ gives into what [Load] takes.
func Environ(list []string) map[string]string {
	out := make(map[string]string, len(list))
	for _, item := range list {
		if name, value, found := strings.Cut(item, "="); found {
			out[name] = value
		}
	}
	return out
}

// Load reads the settings from environ, which it does not change. Names in also are AGENT_
// variables that someone else reads. The error is an [*Error] with a line for each problem.
func Load(environ map[string]string, also ...string) (Config, error) {
	list := Settings()
	values, problems := readFiles(present(environ), list)
	var c Config
	err := env.ParseWithOptions(&c, env.Options{
		Environment: values,
		FuncMap:     map[reflect.Type]env.ParserFunc{reflect.TypeFor[bool](): parseSwitch},
	})
	bad, err := badValues(err, values)
	if err != nil {
		return Config{}, fmt.Errorf("read settings: %w", err)
	}
	c.Unknown = unknown(environ, list, also)
	checks := checker{wrong: bad, problems: append(problems, bad.lines()...)}
	checks.all(&c)
	if len(checks.problems) > 0 {
		return Config{}, &Error{Problems: checks.problems}
	}
	return c, nil
}

// Settings lists all variables, in the order of [Config].
func Settings() []Setting { return settingsOf(reflect.TypeFor[Config]()) }

// settingsOf lists the variables of a struct and of the structs in it.
func settingsOf(t reflect.Type) []Setting {
	var list []Setting
	for f := range fieldsOf(t) {
		name := f.Tag.Get("env")
		switch {
		case name == "-":
		case name != "":
			list = append(list, Setting{
				Name: name, Default: f.Tag.Get("envDefault"), Help: f.Tag.Get("help"), Secret: f.Type == reflect.TypeFor[Secret](),
			})
		case f.Type.Kind() == reflect.Struct:
			list = append(list, settingsOf(f.Type)...)
		}
	}
	return list
}

// fieldsOf yields the fields of a struct.
func fieldsOf(t reflect.Type) func(yield func(reflect.StructField) bool) {
	return func(yield func(reflect.StructField) bool) {
		for field := range t.Fields() {
			if !yield(field) {
				return
			}
		}
	}
}

// present copies what is not empty, without surrounding space.
func present(environ map[string]string) map[string]string {
	out := make(map[string]string, len(environ))
	for name, value := range environ {
		if value = strings.TrimSpace(value); value != "" {
			out[name] = value
		}
	}
	return out
}

// fileSuffix follows the name of a secret whose value is in a file.
const fileSuffix = "_FILE"

// readFiles puts the secrets that are in files in their place.
func readFiles(values map[string]string, list []Setting) (map[string]string, []string) {
	var problems []string
	for _, s := range list {
		path := values[s.Name+fileSuffix]
		if !s.Secret || path == "" {
			continue
		}
		if values[s.Name] != "" {
			problems = append(problems, fmt.Sprintf("%s and %s%s are both set; keep one", s.Name, s.Name, fileSuffix))
			continue
		}
		text, err := os.ReadFile(path)
		value := strings.TrimSpace(string(text))
		switch {
		case err != nil:
			problems = append(problems, fmt.Sprintf("%s%s: %v; name a file that the agent can read", s.Name, fileSuffix, err))
		case value == "":
			problems = append(problems, fmt.Sprintf("%s%s: %s is empty; put in %s", s.Name, fileSuffix, path, s.Help))
		default:
			values[s.Name] = value
		}
	}
	return values, problems
}

// parseSwitch reads on and off.
func parseSwitch(s string) (any, error) {
	switch strings.ToLower(s) {
	case "on", "true", "yes", "1":
		return true, nil
	case "off", "false", "no", "0":
		return false, nil
	}
	return nil, errors.New("not on or off")
}

// failures are the values that have the wrong type, by variable.
type failures map[string]string

// lines lists the problems in the order of the settings.
func (f failures) lines() []string {
	var out []string
	for _, s := range Settings() {
		if value, bad := f[s.Name]; bad {
			out = append(out, fmt.Sprintf("%s: %q is not valid; set %s", s.Name, value, s.Help))
		}
	}
	return out
}

// badValues takes the library's errors apart; what it does not know comes back as an error.
func badValues(err error, values map[string]string) (failures, error) {
	bad := failures{}
	var all env.AggregateError
	if !errors.As(err, &all) {
		return bad, err
	}
	for _, one := range all.Errors {
		var parse env.ParseError
		if !errors.As(one, &parse) {
			return nil, one
		}
		name := variableOf(reflect.TypeFor[Config](), parse.Name)
		bad[name] = values[name]
	}
	return bad, nil
}

// variableOf finds the variable of a field by the field's name.
func variableOf(t reflect.Type, field string) string {
	for f := range fieldsOf(t) {
		if f.Name == field && f.Tag.Get("env") != "" {
			return f.Tag.Get("env")
		}
		if f.Type.Kind() == reflect.Struct && f.Tag.Get("env") == "" {
			if name := variableOf(f.Type, field); name != "" {
				return name
			}
		}
	}
	return ""
}
