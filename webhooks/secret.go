package webhooks

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/credentials"
	"github.com/lanekeeper/lanekeeper/internal/signature"
)

var envForm = regexp.MustCompile(`^\$\{[A-Za-z_][A-Za-z0-9_]*\}$`)

// maxSecret is the size in bytes of the largest file that holds a secret.
const maxSecret = 64 << 10

// checkSecrets reports references that are none. A literal is never repeated in the message.
func checkSecrets(secrets []string) []error {
	if len(secrets) == 0 {
		return []error{errors.New("secrets: is empty; name at least one, as ${NAME} or file:/path")}
	}
	var problems []error
	for i, s := range secrets {
		path, isFile := strings.CutPrefix(s, "file:")
		if envForm.MatchString(s) || isFile && filepath.IsAbs(path) {
			continue
		}
		problems = append(problems, fmt.Errorf(
			"secrets[%d]: is no reference; a secret does not belong into a file that is shared: write ${NAME} of the environment or file:/absolute/path", i))
	}
	return problems
}

// Secrets resolves references now. A missing one is an error that says what to set; it never has a secret in it. getenv
// nil is the process's environment.
func Secrets(references []string, getenv func(string) string) ([]string, error) {
	if getenv == nil {
		getenv = os.Getenv
	}
	var problems []error
	secrets := make([]string, len(references))
	for i, r := range references {
		var err error
		if secrets[i], err = resolveSecret(r, getenv); err != nil {
			problems = append(problems, err)
		}
	}
	if err := errors.Join(problems...); err != nil {
		return nil, fmt.Errorf("resolve references: %w", err) // not "secrets:", behind which logs are blotted out
	}
	return secrets, nil
}

// CheckTokens reports bearer tokens that are too weak to be one: a request proves nothing else, so who guesses the
// token is the sender. A reference that leads nowhere here is no error: the files may be checked elsewhere than they
// are served.
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
		if err != nil {
			continue
		}
		if why := credentials.Weak(secret); why != "" {
			problems = append(problems, fmt.Errorf("%s is too weak for a bearer token: %s; set it to a random text, such as that of openssl rand -hex 32", r, why))
		}
	}
	return errors.Join(problems...)
}

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
	if !envForm.MatchString(reference) {
		return "", errors.New("a reference is ${NAME} or file:/path")
	}
	name := reference[2 : len(reference)-1]
	value := getenv(name)
	if value == "" {
		return "", fmt.Errorf("set the environment variable %s", name)
	}
	return value, nil
}
