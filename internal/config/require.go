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

// LoadServe is [Load] for `agent serve`: what it cannot do without and is not set is told together with what is wrong. Where nothing is
// wrong, see [Config.RequireServe].
func LoadServe(environ map[string]string, also ...string) (Config, error) {
	c, err := Load(environ, also...)
	wrong, ok := errors.AsType[*Error](err)
	if !ok {
		return c, err
	}
	problems, values := wrong.Problems, present(environ)
	for _, name := range []string{"DATABASE_URL", "AGENT_ADMIN_TOKEN"} {
		if values[name] == "" && values[name+fileSuffix] == "" {
			problems = append(problems, unset(name))
		}
	}
	return c, joined(problems)
}

// RequireServe reports what `agent serve` lacks: a database and an admin token. Neither that nor a chat key may be weak,
// also where only this machine can reach the port: a proxy may be before it. The error is an [*Error].
func (c Config) RequireServe() error {
	var problems []string
	if !c.DatabaseURL.IsSet() {
		problems = append(problems, unset("DATABASE_URL"))
	}
	if !c.AdminToken.IsSet() {
		problems = append(problems, unset("AGENT_ADMIN_TOKEN"))
	}
	return joined(append(problems, c.weak()...))
}

// RequireDev reports what `agent dev` lacks. It makes its own database and token, but a token
// that nobody chose does not guard a port that others can reach. The error is an [*Error].
func (c Config) RequireDev() error {
	problems := c.weak()
	if !c.Loopback() && !c.AdminToken.IsSet() {
		problems = append(problems, fmt.Sprintf("AGENT_LISTEN: %s can be reached from other machines; set AGENT_ADMIN_TOKEN, or AGENT_LISTEN to 127.0.0.1:8080", c.Listen))
	}
	return joined(problems)
}

// RequireDatabase reports what a command lacks that only speaks to the database. The error is
// an [*Error].
func (c Config) RequireDatabase() error {
	if c.DatabaseURL.IsSet() {
		return nil
	}
	return joined([]string{unset("DATABASE_URL")})
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

// weak reports secrets that are too easy to guess.
func (c Config) weak() []string {
	var problems []string
	say := func(name, whose string, secret Secret) {
		if why := credentials.Weak(secret.Reveal()); why != "" {
			problems = append(problems, fmt.Sprintf("%s: %s%s; set %s", name, whose, why, help(name)))
		}
	}
	if c.AdminToken.IsSet() {
		say("AGENT_ADMIN_TOKEN", "", c.AdminToken)
	}
	for _, name := range slices.Sorted(maps.Keys(c.ChatKeys)) {
		say("AGENT_CHAT_KEY", "the key "+name+": ", c.ChatKeys[name])
	}
	return problems
}

func unset(name string) string {
	return fmt.Sprintf("%s is not set; set it, or %s%s, to %s", name, name, fileSuffix, help(name))
}

// joined makes an error of problems, if there are any.
func joined(problems []string) error {
	if len(problems) == 0 {
		return nil
	}
	return &Error{Problems: problems}
}
