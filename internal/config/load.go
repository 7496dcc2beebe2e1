package config

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/url"
	"os"
	"reflect"
	"slices"
	"strings"

	"github.com/caarlos0/env/v11"
	"github.com/joho/godotenv"

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

// LogValue masks the secret in logs.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

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
		FuncMap:     map[reflect.Type]env.ParserFunc{reflect.TypeFor[bool](): parseBool},
	})
	bad, err := badValues(err, values)
	if err != nil {
		return Config{}, fmt.Errorf("read settings: %w", err)
	}
	c.Unknown = unknownWarnings(environ, list, also)
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

func fieldsOf(t reflect.Type) func(yield func(reflect.StructField) bool) {
	return func(yield func(reflect.StructField) bool) {
		for field := range t.Fields() {
			if !yield(field) {
				return
			}
		}
	}
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

// DotEnv is the content of a file .env. Another person may have written it, so it never sets a program, a file with a
// secret, or a destination for secrets from elsewhere.
type DotEnv struct {
	// Environ is the given environment with the settings of the file.
	Environ map[string]string
	// References are the other variables of the file: ${NAME} in a workspace may refer to them, and nothing else may.
	References map[string]string
	// Set and Ignored are the sorted names that the file set, and those that it must never set.
	Set, Ignored []string
}

// forbiddenInFile lists names that .env must not set: settings that name programs or other databases, and variables
// that child processes inherit.
var forbiddenInFile = []string{"AGENT_PG_BIN", "AGENT_TEST_DATABASE_URL", "PATH", "HOME", "LANG"}

// LoadDotEnv reads .env if it exists. Values of environ take precedence. more reports names that are settings of
// other components. The error is an [*Error] for a forbidden combination.
func LoadDotEnv(path string, environ map[string]string, isOther func(name string) bool) (DotEnv, error) {
	out := DotEnv{Environ: maps.Clone(environ), References: map[string]string{}}
	if out.Environ == nil {
		out.Environ = map[string]string{}
	}
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return out, nil
	}
	if err != nil {
		return DotEnv{}, fmt.Errorf("read .env: %w", err)
	}
	values, err := godotenv.UnmarshalBytes(bytes.TrimPrefix(text, []byte("\ufeff"))) // editors on Windows write it
	if err != nil {
		// The parser's message quotes the file, and the file has secrets.
		return DotEnv{}, fmt.Errorf("read .env: %s is not lines of NAME=value", path)
	}
	settings := map[string]bool{}
	for _, s := range Settings() {
		settings[s.Name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		setting := settings[name] || isOther(name)
		switch {
		case environ[name] != "" || hasFileVariant(environ, name):
			continue
		case slices.Contains(forbiddenInFile, name) || strings.HasSuffix(name, fileSuffix) ||
			strings.HasPrefix(name, "AGENT_") && !setting:
			out.Ignored = append(out.Ignored, name)
			continue
		case setting:
			out.Environ[name] = values[name]
		default:
			out.References[name] = values[name]
		}
		out.Set = append(out.Set, name)
	}
	return out, problemsError(out.conflicts(environ))
}

// conflicts reports secrets from the environment that the file would redirect, and a port that it would open.
func (d DotEnv) conflicts(environ map[string]string) (problems []string) {
	for _, pair := range [][2]string{
		{"OPENAI_BASE_URL", "OPENAI_API_KEY"},
		{"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS"},
		{"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"},
		{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS"},
		{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"},
		{"DATABASE_URL", "PGPASSWORD"},
		{"DATABASE_DIRECT_URL", "PGPASSWORD"},
		{"DATABASE_READ_URL", "PGPASSWORD"},
	} {
		place, secret := pair[0], pair[1]
		if !slices.Contains(d.Set, place) || environ[secret] == "" && !hasFileVariant(environ, secret) ||
			hasPassword(place, d.Environ[place]) {
			continue
		}
		problems = append(problems, fmt.Sprintf("%s is in .env, and %s, which would be sent there, is from the "+
			"environment; set both in the same place", place, secret))
	}
	if listen := (Config{Listen: d.Environ["AGENT_LISTEN"]}); slices.Contains(d.Set, "AGENT_LISTEN") &&
		!listen.Loopback() {
		if _, err := splitListen(listen.Listen); err == nil {
			problems = append(problems, "AGENT_LISTEN: .env cannot open a port to other machines; set it in the environment")
		}
	}
	return problems
}

// hasPassword reports a database URL with its own password.
func hasPassword(name, value string) bool {
	if !strings.HasPrefix(name, "DATABASE_") {
		return false
	}
	u, err := url.Parse(value)
	if err != nil || u.User == nil {
		return false
	}
	_, has := u.User.Password()
	return has
}

// hasFileVariant reports whether NAME_FILE is set, which excludes NAME.
func hasFileVariant(environ map[string]string, name string) bool {
	return environ[name+fileSuffix] != ""
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
