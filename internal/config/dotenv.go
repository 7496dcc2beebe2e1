package config

import (
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"slices"
	"strings"

	"github.com/joho/godotenv"
)

// DotEnv is what a file .env sets. It lies in a folder that somebody else may have made, so it never names a program, a
// file with a secret, or a place that secrets from elsewhere would be sent to.
type DotEnv struct {
	// Environ is the environment given, with the settings that the file adds to it.
	Environ map[string]string
	// References are what the file has besides settings: what ${NAME} in a workspace may stand for, and nothing else.
	References map[string]string
	// Set and Ignored are the names that were taken from the file and those that never are, sorted.
	Set, Ignored []string
}

// neverFromFile are names that .env may not set: the settings that name programs or other databases, and what child processes inherit.
var neverFromFile = []string{"AGENT_PG_BIN", "AGENT_TEST_DATABASE_URL", "PATH", "HOME", "LANG"}

// LoadDotEnv reads a file .env, if there is one. What environ sets, itself or by _FILE, stays. more reports names that are settings of
// others. The error is an [*Error] where the file sets what it may not.
func LoadDotEnv(path string, environ map[string]string, more func(name string) bool) (DotEnv, error) {
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
	values, err := godotenv.UnmarshalBytes(text)
	if err != nil {
		// The parser's message quotes the file, and the file has secrets.
		return DotEnv{}, fmt.Errorf("read .env: %s is not lines of NAME=value", path)
	}
	settings := map[string]bool{}
	for _, s := range Settings() {
		settings[s.Name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		setting := settings[name] || more(name)
		switch {
		case environ[name] != "" || hasFileVariant(environ, name):
			continue
		case slices.Contains(neverFromFile, name) || strings.HasSuffix(name, fileSuffix) || strings.HasPrefix(name, "AGENT_") && !setting:
			out.Ignored = append(out.Ignored, name)
			continue
		case setting:
			out.Environ[name] = values[name]
		default:
			out.References[name] = values[name]
		}
		out.Set = append(out.Set, name)
	}
	return out, joined(out.misleading(environ))
}

// misleading reports what the file would have secrets of another source sent to, and a port that it would open.
func (d DotEnv) misleading(environ map[string]string) (problems []string) {
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
		if !slices.Contains(d.Set, place) || environ[secret] == "" && !hasFileVariant(environ, secret) || sends(place, d.Environ[place]) {
			continue
		}
		problems = append(problems, fmt.Sprintf("%s is in .env, and %s, which would be sent there, is from the environment; set both in the same place", place, secret))
	}
	if listen := (Config{Listen: d.Environ["AGENT_LISTEN"]}); slices.Contains(d.Set, "AGENT_LISTEN") && !listen.Loopback() {
		if _, err := splitListen(listen.Listen); err == nil {
			problems = append(problems, "AGENT_LISTEN: .env cannot open a port to other machines; set it in the environment")
		}
	}
	return problems
}

// sends reports a database URL that has a password of its own, in the place of another one.
func sends(name, value string) bool {
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

// hasFileVariant reports whether NAME_FILE is set, which would conflict with NAME.
func hasFileVariant(environ map[string]string, name string) bool {
	return environ[name+fileSuffix] != ""
}
