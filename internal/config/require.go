package config

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/credentials"
)

// LoadServe is [Load] for `agent serve`. It reports missing required settings together with invalid ones. See
// [Config.RequireServe].
func LoadServe(environ map[string]string, also ...string) (Config, error) {
	c, err := Load(environ, also...)
	invalid, ok := errors.AsType[*Error](err)
	if !ok {
		return c, err
	}
	problems, values := invalid.Problems, nonEmpty(environ)
	for _, name := range []string{"DATABASE_URL", "AGENT_ADMIN_TOKEN"} {
		if values[name] == "" && values[name+fileSuffix] == "" {
			problems = append(problems, unsetProblem(name))
		}
	}
	return c, problemsError(problems)
}

// RequireServe reports missing settings of `agent serve`: the database and the admin token. Weak secrets are rejected
// even on loopback, because a proxy may be in front. The error is an [*Error].
func (c Config) RequireServe() error {
	var problems []string
	if !c.DatabaseURL.IsSet() {
		problems = append(problems, unsetProblem("DATABASE_URL"))
	}
	if !c.AdminToken.IsSet() {
		problems = append(problems, unsetProblem("AGENT_ADMIN_TOKEN"))
	}
	return problemsError(append(problems, c.weakSecrets()...))
}

// RequireDev reports missing settings of `agent dev`. It creates its own database and token, but a port open to other
// machines needs a chosen token. The error is an [*Error].
func (c Config) RequireDev() error {
	problems := c.weakSecrets()
	if !c.Loopback() && !c.AdminToken.IsSet() {
		problems = append(problems, fmt.Sprintf("AGENT_LISTEN: %s can be reached from other machines; set "+
			"AGENT_ADMIN_TOKEN, or AGENT_LISTEN to 127.0.0.1:8080", c.Listen))
	}
	return problemsError(problems)
}

// Loopback reports whether only this machine can reach the listening address.
func (c Config) Loopback() bool {
	host, err := splitListen(c.Listen)
	if err != nil {
		return false
	}
	if strings.EqualFold(host, "localhost") {
		return true
	}
	addr, err := netip.ParseAddr(host)
	return err == nil && addr.Unmap().IsLoopback()
}

// weakSecrets reports secrets that are easy to guess, and an admin token that looks like a principal's.
func (c Config) weakSecrets() []string {
	var problems []string
	check := func(name, prefix string, secret Secret) {
		if reason := credentials.Weak(secret.Reveal()); reason != "" {
			problems = append(problems, fmt.Sprintf("%s: %s%s; set %s", name, prefix, reason, helpOf(name)))
		}
	}
	if c.AdminToken.IsSet() {
		check("AGENT_ADMIN_TOKEN", "", c.AdminToken)
	}
	if strings.HasPrefix(c.AdminToken.Reveal(), "lk_") {
		problems = append(problems, "AGENT_ADMIN_TOKEN: it begins with lk_, as the tokens of principals do; set "+
			helpOf("AGENT_ADMIN_TOKEN"))
	}
	for _, name := range slices.Sorted(maps.Keys(c.ChatKeys)) {
		check("AGENT_CHAT_KEY", "the key "+name+": ", c.ChatKeys[name])
	}
	return problems
}

func unsetProblem(name string) string {
	return fmt.Sprintf("%s is not set; set it, or %s%s, to %s", name, name, fileSuffix, helpOf(name))
}

// problemsError returns an [*Error], or nil without problems.
func problemsError(problems []string) error {
	if len(problems) == 0 {
		return nil
	}
	return &Error{Problems: problems}
}
