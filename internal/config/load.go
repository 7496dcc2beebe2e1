package config

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"

	"github.com/caarlos0/env/v11"

	"github.com/lanekeeper/lanekeeper/internal/nearest"
)

// Error lists all invalid settings, one line each.
type Error struct{ Problems []string }

func (e *Error) Error() string { return strings.Join(e.Problems, "\n") }

// Setting describes one variable.
type Setting struct {
	Name    string
	Default string
	Help    string
	Secret  bool
}

// Environ converts os.Environ for [Load].
func Environ(list []string) map[string]string {
	out := make(map[string]string, len(list))
	for _, item := range list {
		if name, value, found := strings.Cut(item, "="); found {
			out[name] = value
		}
	}
	return out
}

// Load reads the settings from environ without changing it. also lists AGENT_ variables that other components read. The
// error is an [*Error] with a line for each problem.
func Load(environ map[string]string, also ...string) (Config, error) {
	list := Settings()
	values, problems := readFiles(nonEmpty(environ), list)
	var c Config
	err := env.ParseWithOptions(&c, env.Options{
		Environment: values,
		FuncMap: map[reflect.Type]env.ParserFunc{
			reflect.TypeFor[bool](): parseBool, reflect.TypeFor[[]string](): parseList,
		},
	})
	bad, err := badValues(err, values)
	if err != nil {
		return Config{}, fmt.Errorf("read settings: %w", err)
	}
	c.Unknown = unknownWarnings(values, list, also)
	checks := checker{invalid: bad, problems: append(problems, bad.lines()...)}
	checks.all(&c)
	if len(checks.problems) > 0 {
		return Config{}, &Error{Problems: checks.problems}
	}
	return c, nil
}

// Settings lists all variables in the order of [Config].
func Settings() []Setting { return settingsOf(reflect.TypeFor[Config]()) }

// settingsOf lists the variables of a struct and its nested structs.
func settingsOf(t reflect.Type) []Setting {
	var list []Setting
	for f := range t.Fields() {
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

// nonEmpty copies trimmed, non-empty values.
func nonEmpty(environ map[string]string) map[string]string {
	out := make(map[string]string, len(environ))
	for name, value := range environ {
		if value = strings.TrimSpace(value); value != "" {
			out[name] = value
		}
	}
	return out
}

// fileSuffix marks a variable that names a file with the secret.
const fileSuffix = "_FILE"

// readFiles resolves secrets stored in files.
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

// parseBool accepts on and off.
func parseBool(s string) (any, error) {
	switch strings.ToLower(s) {
	case "on", "true", "yes", "1":
		return true, nil
	case "off", "false", "no", "0":
		return false, nil
	}
	return nil, errors.New("not on or off")
}

// parseList splits at commas, and drops blanks and empty items.
func parseList(s string) (any, error) {
	items := strings.Split(s, ",")
	for i := range items {
		items[i] = strings.TrimSpace(items[i])
	}
	return slices.DeleteFunc(items, func(item string) bool { return item == "" }), nil
}

// invalidValues maps variables to values of the wrong type.
type invalidValues map[string]string

// lines lists the problems in the order of the settings.
func (f invalidValues) lines() []string {
	var out []string
	for _, s := range Settings() {
		if value, bad := f[s.Name]; bad {
			out = append(out, fmt.Sprintf("%s: %q is not valid; set %s", s.Name, value, s.Help))
		}
	}
	return out
}

// badValues extracts the invalid values from the library's error. It returns other errors unchanged.
func badValues(err error, values map[string]string) (invalidValues, error) {
	bad := invalidValues{}
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

// variableOf returns the variable of a struct field.
func variableOf(t reflect.Type, field string) string {
	for f := range t.Fields() {
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

// unknownWarnings warns about unknown AGENT_ variables.
func unknownWarnings(environ map[string]string, list []Setting, also []string) []string {
	known := slices.Clone(also)
	for _, s := range list {
		known = append(known, s.Name)
		if s.Secret {
			known = append(known, s.Name+fileSuffix)
		}
	}
	var warnings []string
	for _, name := range slices.Sorted(maps.Keys(environ)) {
		if !strings.HasPrefix(name, "AGENT_") || slices.Contains(known, name) {
			continue
		}
		warning := name + " is not a setting"
		if suggestion := nearest.To(name, known); suggestion != "" {
			warning = fmt.Sprintf("%s; did you mean %s?", warning, suggestion)
		}
		warnings = append(warnings, warning)
	}
	return warnings
}
