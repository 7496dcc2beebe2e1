package config

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"slices"
	"strings"

	"github.com/joho/godotenv"
)

// DotEnv is the content of a file .env. Another person may have written it, so it sets no program, no file with a
// secret, and no destination for a secret of the environment.
type DotEnv struct {
	// Environ is the given environment with the settings of the file.
	Environ map[string]string
	// References are the other variables of the file, for ${NAME} in a workspace.
	References map[string]string
	// Set and Ignored are the sorted names that the file set, and those that it must not set.
	Set, Ignored []string
}

// forbiddenInFile lists names that .env must not set: settings that name programs or other databases, and variables
// that child processes inherit.
var forbiddenInFile = []string{"AGENT_PG_BIN", "AGENT_TEST_DATABASE_URL", "PATH", "HOME", "LANG"}

// secretPlaces pairs the setting of a destination with a secret that is sent there. Some of the secrets are variables
// of libpq and OpenTelemetry.
var secretPlaces = [][2]string{
	{"OPENAI_BASE_URL", "OPENAI_API_KEY"},
	{"OPENAI_BASE_URL", "AGENT_MODEL_HEADERS"},
	{"OPENAI_BASE_URL", "AGENT_MODEL_QUERY"},
	{"AGENT_OIDC_ISSUER", "AGENT_OIDC_CLIENT_SECRET"},
	{"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS"},
	{"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"},
	{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS"},
	{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"},
	{"DATABASE_URL", "PGPASSWORD"},
	{"DATABASE_DIRECT_URL", "PGPASSWORD"},
	{"DATABASE_READ_URL", "PGPASSWORD"},
}

// IsSecret reports whether a variable is a secret of the server: a setting of type [Secret], or a secret that libpq or
// OpenTelemetry reads.
func IsSecret(name string) bool {
	return slices.ContainsFunc(Settings(), func(s Setting) bool { return s.Secret && s.Name == name }) ||
		slices.ContainsFunc(secretPlaces, func(pair [2]string) bool { return pair[1] == name })
}

// LoadDotEnv reads .env if it exists. Values of environ take precedence. isOther reports names that are settings of
// other components. For a combination that would send a secret of environ to a destination of the file, the error is
// an [*Error].
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

// conflicts reports secrets of environ that would go to a destination of the file, and a port that the file would open.
func (d DotEnv) conflicts(environ map[string]string) (problems []string) {
	for _, pair := range append(secretPlaces, [2]string{d.embeddingPlace(), "AGENT_EMBEDDING_KEY"}) {
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

// embeddingPlace is the setting of the server that gets the key of the embedding model.
func (d DotEnv) embeddingPlace() string {
	if d.Environ["AGENT_EMBEDDING_BASE_URL"] == "" {
		return "OPENAI_BASE_URL"
	}
	return "AGENT_EMBEDDING_BASE_URL"
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
