package mcp

import (
	"fmt"
	"io"
	"maps"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/fielderr"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/skills"
)

// hasSecretQuery reports whether a URL's query has a value that looks like a secret.
func hasSecretQuery(u *url.URL) bool {
	for name, values := range u.Query() {
		for _, v := range values {
			if redact.Hides(name, v) || redact.Text(v, 10_000) != v {
				return true
			}
		}
	}
	return false
}

const (
	filePrefix    = "file:"
	maxSecretFile = 64 << 10
)

var referencePattern = regexp.MustCompile(`\$\{([a-zA-Z_][a-zA-Z0-9_]*)\}`)

// checkValue rejects a header or a variable that holds a secret. A reference to a secret is valid.
func checkValue(field, name string, value any) fielderr.List {
	text, ok := value.(string)
	switch {
	case !ok:
		return []error{fmt.Errorf("%s: must be text; quote it", field)}
	case strings.ContainsAny(text, "\r\n\x00"):
		return []error{fmt.Errorf("%s: must be one line", field)}
	case strings.HasPrefix(text, filePrefix):
		if !strings.HasPrefix(text, filePrefix+"/") {
			return []error{fmt.Errorf("%s: write a whole path: file:/run/secrets/token", field)}
		}
		return nil
	}
	rest := referencePattern.ReplaceAllString(text, "")
	switch {
	case strings.Contains(rest, "${"):
		return []error{fmt.Errorf("%s: write a reference as ${NAME}", field)}
	case rest != text:
		return nil
	case redact.Hides(name, text) || redact.Text(text, 10_000) != text:
		return []error{fmt.Errorf("%s: do not write a secret here; refer to an environment variable as ${NAME}, or to a "+
			"file as file:/path", field)}
	}
	return nil
}

// resolve replaces the references in values, and returns the resolved secrets. The error names an unresolved reference.
// It has class configuration, so self-heal does not blame the skill.
func resolve(
	values map[string]any, getenv func(string) string,
) (resolved map[string]string, secrets []string, err error) {
	resolved = make(map[string]string, len(values))
	for _, name := range slices.Sorted(maps.Keys(values)) {
		text, _ := values[name].(string)
		if file, ok := strings.CutPrefix(text, filePrefix); ok {
			if resolved[name], err = readSecret(file); err != nil {
				return nil, nil, skills.NewConfigError("read the secret of %s: %s", name, err)
			}
			secrets = append(secrets, resolved[name])
			continue
		}
		var missing string
		resolved[name] = referencePattern.ReplaceAllStringFunc(text, func(r string) string {
			variable := referencePattern.FindStringSubmatch(r)[1]
			value := getenv(variable)
			if value == "" {
				missing = variable
			}
			secrets = append(secrets, value)
			return value
		})
		if missing != "" {
			return nil, nil, skills.NewConfigError("set the environment variable %s, which %s refers to", missing, name)
		}
		if strings.ContainsAny(resolved[name], "\r\n\x00") {
			return nil, nil, skills.NewConfigError("%s has a line break after its reference is resolved", name)
		}
	}
	return resolved, secrets, nil
}

func readSecret(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	raw, err := io.ReadAll(io.LimitReader(f, maxSecretFile+1))
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	switch text := strings.TrimSpace(string(raw)); {
	case err != nil:
		return "", err
	case text == "" || len(raw) > maxSecretFile || strings.ContainsAny(text, "\r\n\x00"):
		return "", fmt.Errorf("%s must hold one line", file)
	default:
		return text, nil
	}
}
