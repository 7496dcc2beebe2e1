package webhooks

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/credentials"
	"github.com/lanekeeper/lanekeeper/internal/fielderr"
	"github.com/lanekeeper/lanekeeper/internal/signature"
)

var envRegexp = regexp.MustCompile(`^\$\{[A-Za-z_][A-Za-z0-9_]*\}$`)

// maxSecret bounds a secret's file, in bytes.
const maxSecret = 64 << 10

// checkSecrets reports invalid references. Its errors never contain the text, which may be a secret.
func checkSecrets(secrets []string) fielderr.List {
	if len(secrets) == 0 {
		return []error{errors.New("secrets: is empty; name at least one, as ${NAME} or file:/path")}
	}
	var problems fielderr.List
	for i, reference := range secrets {
		if !isReference(reference) {
			problems.Add(fmt.Sprintf("secrets[%d]", i), "is not a reference; a shared file must not contain a secret: write "+
				"${NAME} of the environment or file:/absolute/path")
		}
	}
	return problems
}

// isReference reports whether a text is ${NAME} or file:/path.
func isReference(s string) bool {
	path, isFile := strings.CutPrefix(s, "file:")
	return envRegexp.MatchString(s) || isFile && filepath.IsAbs(path)
}

// Secrets resolves references. The error of a missing secret names the setting, and never contains a secret; the other
// secrets come with it. A nil getenv reads the process's environment.
func Secrets(references []string, getenv func(string) string) ([]string, error) {
	if getenv == nil {
		getenv = os.Getenv
	}
	var problems []error
	var secrets []string
	for _, r := range references {
		secret, err := resolveSecret(r, getenv)
		if err != nil {
			problems = append(problems, err)
			continue
		}
		secrets = append(secrets, secret)
	}
	if err := errors.Join(problems...); err != nil {
		return secrets, fmt.Errorf("resolve references: %w", err) // logs redact what follows "secrets:"
	}
	return secrets, nil
}

// CheckTokens returns an error for weak bearer tokens, because nothing else authenticates a request. It skips
// references that it cannot resolve, because a workspace may be validated on another machine.
func CheckTokens(scheme signature.Scheme, references []string, getenv func(string) string) error {
	if scheme != signature.Bearer {
		return nil
	}
	if getenv == nil {
		getenv = os.Getenv
	}
	var problems []error
	for _, r := range references {
		secret, err := resolveSecret(r, getenv)
		if weakness := credentials.Weak(secret); err == nil && weakness != "" {
			problems = append(problems, fmt.Errorf("%s is too weak for a bearer token: %s; set it to a random text, such as "+
				"that of openssl rand -hex 32", r, weakness))
		}
	}
	return errors.Join(problems...)
}

// resolveSecret reads the environment variable or file that a reference names. White space around the text of a file is
// no part of the secret. Errors name the reference and never the value.
func resolveSecret(reference string, getenv func(string) string) (string, error) {
	if path, isFile := strings.CutPrefix(reference, "file:"); isFile {
		raw, err := os.ReadFile(path)
		switch text := strings.TrimSpace(string(raw)); {
		case err != nil:
			return "", fmt.Errorf("read file %s: %w", path, err)
		case text == "" || len(raw) > maxSecret:
			return "", fmt.Errorf("file %s is empty or larger than %d bytes", path, maxSecret)
		default:
			return text, nil
		}
	}
	if !envRegexp.MatchString(reference) {
		return "", errors.New("a reference is ${NAME} or file:/path")
	}
	name := reference[2 : len(reference)-1]
	value := getenv(name)
	if value == "" {
		return "", fmt.Errorf("set the environment variable %s", name)
	}
	return value, nil
}
