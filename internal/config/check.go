package config

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"net/url"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/internal/clientip"
	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/schedule"
	"github.com/lanekeeper/lanekeeper/trace"
)

// checker collects problems.
type checker struct {
	invalid  invalidValues
	problems []string
}

// report adds a problem of a variable, unless its value has the wrong type (invalid).
func (k *checker) report(name, format string, args ...any) {
	if _, done := k.invalid[name]; !done {
		k.problems = append(k.problems, name+": "+fmt.Sprintf(format, args...)+"; set "+helpOf(name))
	}
}

// helpOf returns the help text of a variable.
func helpOf(name string) string {
	for _, s := range settingsOf(reflect.TypeFor[Config]()) {
		if s.Name == name {
			return s.Help
		}
	}
	return "it"
}

// all validates the values and derives others from them.
func (k *checker) all(c *Config) {
	k.connections(c)
	k.names(c)
	k.times(c)
	k.limits(c)
	k.dailyLimits(c.Limits)
	k.prices(c)
	k.privateHosts(c)
	k.proxies(c)
	k.admission(c)
	k.chat(c)
}

// connections validates addresses and tokens. It quotes no secret.
func (k *checker) connections(c *Config) {
	k.database("DATABASE_URL", c.DatabaseURL)
	k.database("DATABASE_DIRECT_URL", c.DirectURL)
	k.database("DATABASE_READ_URL", c.ReadURL)
	k.database("AGENT_TEST_DATABASE_URL", c.TestDatabaseURL)
	if _, err := splitListen(c.Listen); err != nil {
		k.report("AGENT_LISTEN", "%q is not an address (%v)", c.Listen, err)
	}
	k.token("AGENT_ADMIN_TOKEN", c.AdminToken)
	k.token("AGENT_CHAT_KEY", c.ChatKey)
	k.token("OPENAI_API_KEY", c.OpenAIKey)
	k.provider(&c.Provider)
	k.embedding(c)
	k.server("AGENT_PUBLIC_URL", c.PublicURL)
	k.server("OPENAI_BASE_URL", c.OpenAIBaseURL)
	if c.PGBin != "" {
		if at, err := os.Stat(c.PGBin); err != nil || !at.IsDir() {
			k.report("AGENT_PG_BIN", "%q is not a directory", c.PGBin)
		}
	}
}

// database validates a connection string.
func (k *checker) database(name string, dsn Secret) {
	switch text := dsn.Reveal(); {
	case !dsn.IsSet() || isDatabase(text):
	case hasScheme(text): // the parser's error may quote the password
		k.report(name, "it is a URL that cannot be read; percent-encode special characters of the password "+
			"(@ is %%40, # is %%23, / is %%2F, ? is %%3F, %% is %%25)")
	default:
		k.report(name, "not a PostgreSQL URL")
	}
}

// hasScheme reports a PostgreSQL URL scheme.
func hasScheme(s string) bool {
	return strings.HasPrefix(s, "postgres://") || strings.HasPrefix(s, "postgresql://")
}

// token requires characters that an HTTP header can carry.
func (k *checker) token(name string, token Secret) {
	if strings.ContainsFunc(token.Reveal(), func(r rune) bool { return r <= ' ' || r > '~' }) {
		k.report(name, "it has a space or a character that no HTTP header can carry")
	}
}

// names validates the agent's name and the names of logging.
func (k *checker) names(c *Config) {
	const longest = 100
	if utf8.RuneCountInString(c.Name) > longest ||
		strings.ContainsFunc(c.Name, func(r rune) bool { return !unicode.IsPrint(r) }) {
		k.report("AGENT_NAME", "it is too long or has a character that does not print")
	}
	if _, err := logging.Level(c.LogLevel); err != nil {
		k.report("AGENT_LOG_LEVEL", "%q is not a level", c.LogLevel)
	}
	if f := strings.ToLower(c.LogFormat); f != "text" && f != "json" {
		k.report("AGENT_LOG_FORMAT", "%q is not a format", c.LogFormat)
	}
}

// times validates the schedule, the time zone and durations.
func (k *checker) times(c *Config) {
	var err error
	if c.Location, err = schedule.Location(c.Timezone); err != nil {
		k.report("AGENT_TIMEZONE", "%v", err)
	}
	if c.Heartbeat, err = schedule.Parse(c.HeartbeatCron, c.Location); err != nil {
		k.report("AGENT_HEARTBEAT_CRON", "%v", err)
	}
	if c.WorkerLease%time.Second != 0 {
		k.report("AGENT_WORKER_LEASE", "%s has a fraction of a second", c.WorkerLease)
	} else {
		k.duration("AGENT_WORKER_LEASE", c.WorkerLease, time.Second, 10*time.Minute)
	}
	k.duration("AGENT_DRAIN_DELAY", c.DrainDelay, 0, 10*time.Minute)
	k.duration("AGENT_SHUTDOWN_TIMEOUT", c.ShutdownTimeout, 0, time.Hour)
	k.duration("AGENT_RUN_TIMEOUT", c.Budget.RunTimeout, time.Second, 30*24*time.Hour)
	k.duration("AGENT_OPERATE_IDLE", c.Operate.Idle, 10*time.Second, 24*time.Hour)
	k.duration("AGENT_CHAT_APPROVAL_WAIT", c.Chat.ApprovalWait, time.Second, time.Hour)
	k.duration("AGENT_SELFHEAL_WINDOW", c.SelfHeal.Window, time.Minute, 366*24*time.Hour)
	k.duration("AGENT_SELFHEAL_COOLDOWN", c.SelfHeal.Cooldown, 0, 366*24*time.Hour)
}

// duration requires d between min and max.
func (k *checker) duration(name string, d, min, max time.Duration) {
	if d < min || d > max {
		k.report(name, "%s is not from %s to %s", d, min, max)
	}
}

// limits validates numbers.
func (k *checker) limits(c *Config) {
	k.number("AGENT_WORKERS", float64(c.Workers), 1, 1000)
	k.number("AGENT_MAX_ITERATIONS", float64(c.Budget.MaxIterations), 1, 10_000)
	k.number("AGENT_MAX_TOKENS", float64(c.Budget.MaxTokens), 0, 1e12)
	k.number("AGENT_MAX_COST_USD", c.Budget.MaxCostUSD, 0, 1e6)
	k.number("AGENT_CONTEXT_TOKENS", float64(c.Budget.ContextTokens), 1000, 1e7)
	k.number("AGENT_CHAT_RATE", float64(c.Chat.Rate), 1, 100_000)
	k.number("AGENT_CHAT_MAX_BYTES", float64(c.Chat.MaxBytes), 1024, 16<<20)
	k.number("AGENT_DOCUMENT_MAX_BYTES", float64(c.DocumentMaxBytes), 1024, 32<<20)
	k.number("AGENT_SELFHEAL_FAILURES", float64(c.SelfHeal.Failures), 1, 1000)
	k.number("AGENT_SELFHEAL_RATE", c.SelfHeal.FailureRate, math.SmallestNonzeroFloat64, 1)
	k.number("AGENT_SELFHEAL_RATE_CALLS", float64(c.SelfHeal.RateCalls), 1, 100_000)
}

// dailyLimits validates the daily budgets.
func (k *checker) dailyLimits(l Limits) {
	const most = 1e12
	for _, d := range []struct {
		surface string
		tokens  int
		usd     float64
	}{
		{"DAY", l.DayTokens, l.DayUSD},
		{"HEARTBEAT", l.HeartbeatTokens, l.HeartbeatUSD},
		{"OPERATE", l.OperateTokens, l.OperateUSD},
		{"CHAT", l.ChatTokens, l.ChatUSD},
		{"WEBHOOK", l.WebhookTokens, l.WebhookUSD},
	} {
		k.number("AGENT_BUDGET_"+d.surface+"_TOKENS", float64(d.tokens), 0, most)
		k.number("AGENT_BUDGET_"+d.surface+"_USD", d.usd, 0, most)
	}
}

// number requires n between min and max; NaN fails.
func (k *checker) number(name string, n, min, max float64) {
	if !(n >= min && n <= max) {
		k.report(name, "%v is out of range", n)
	}
}

// privateHosts validates the private hosts that skills may reach.
func (k *checker) privateHosts(c *Config) {
	for _, item := range c.PrivateHTTP {
		host, err := splitListen(item)
		if err != nil {
			host = item
		}
		_, prefixErr := netip.ParsePrefix(item)
		_, addrErr := netip.ParseAddr(strings.Trim(host, "[]"))
		if prefixErr != nil && addrErr != nil && (host == "" || strings.ContainsAny(host, "/:*@ ?#")) {
			k.report("AGENT_ALLOW_PRIVATE_HTTP", "%q is not a host, host:port, an address or a network", item)
		}
	}
}

// proxies parses the networks of trusted proxies.
func (k *checker) proxies(c *Config) {
	var err error
	if c.Proxies, err = clientip.Parse(c.ProxyList); err != nil {
		k.report("AGENT_TRUSTED_PROXIES", "%v", err)
	}
}

// admission parses the concurrency limits of flows and surfaces.
func (k *checker) admission(c *Config) {
	seen := map[string]bool{}
	for _, item := range c.RunLimits {
		what, number, _ := strings.Cut(item, "=")
		kind, name, _ := strings.Cut(strings.TrimSpace(what), ":")
		running, err := strconv.Atoi(strings.TrimSpace(number))
		known := kind == "flow" && name != "" || kind == "surface" &&
			slices.Contains(trace.Surfaces(), name)
		switch {
		case !known || err != nil || running < 0 || running > 1_000_000:
			k.report("AGENT_LIMITS", "%q does not give a flow or a surface and a number up to 1000000", item)
			return
		case seen[kind+":"+name]:
			k.report("AGENT_LIMITS", "%s:%s is given twice", kind, name)
			return
		}
		seen[kind+":"+name] = true
		c.Admission = append(c.Admission, Admission{kind, name, running})
	}
}

// isDatabase reports a URL or key=value string of PostgreSQL.
func isDatabase(s string) bool {
	if hasScheme(s) {
		_, err := url.Parse(s)
		escape, is := errors.AsType[url.EscapeError](err)
		return err == nil || is && strings.EqualFold(string(escape), "%2F") // the host is the path of a socket
	}
	return !strings.Contains(s, "://") && strings.Contains(s, "=")
}

// splitListen returns the host of a listening address.
func splitListen(listen string) (string, error) {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return "", errors.New("host:port expected")
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return "", fmt.Errorf("port %q is not from 0 to 65535", port)
	}
	return host, nil
}
