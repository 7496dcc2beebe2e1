package config_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

func load(t *testing.T, environ map[string]string) config.Config {
	t.Helper()
	c, err := config.Load(environ)
	require.NoError(t, err)
	return c
}

// problems returns the lines of an error.
func problems(t *testing.T, err error) []string {
	t.Helper()
	var e *config.Error
	require.Truef(t, errors.As(err, &e), "error is %T %v, want *config.Error", err, err)
	return e.Problems
}

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	testkit.WriteFile(t, path, text)
	return path
}

func TestDefaults(t *testing.T) {
	c := load(t, nil)
	assert.Truef(t, c.Listen == "127.0.0.1:8080" && c.HeartbeatCron == "*/30 * * * *" && c.Name == "agent" &&
		c.LanesEnabled && c.LogLevel == "info" && c.LogFormat == "text" && c.Location == time.UTC, "got %+v", c)
	want := config.SelfHeal{Failures: 3, Window: 72 * time.Hour, FailureRate: 0.5, RateCalls: 20, Cooldown: 24 * time.Hour}
	assert.NoDiff(t, want, c.SelfHeal)
	assert.Truef(t, c.Budget.MaxIterations > 0 && c.Budget.RunTimeout > 0 && c.Workers > 0 && c.ShutdownTimeout > 0,
		"got %+v", c)
	next := c.Heartbeat.Next(time.Date(2026, 1, 1, 0, 1, 0, 0, time.UTC))
	assert.Truef(t, next.Minute() == 30, "first heartbeat at %v", next)
}

func TestEmptyVariableIsUnset(t *testing.T) {
	c := load(t, map[string]string{"AGENT_LISTEN": "", "AGENT_WORKERS": " "})
	assert.Truef(t, c.Listen == "127.0.0.1:8080" && c.Workers == 10, "got %q, %d", c.Listen, c.Workers)
}

func TestValues(t *testing.T) {
	environ := map[string]string{
		"DATABASE_URL": "postgres://a:b@h/d", "AGENT_LANES": "off", "AGENT_TIMEZONE": "Europe/Madrid",
		"DATABASE_READ_URL":    "postgres://a:b@%2Frun%2Fpostgresql:5433/d",
		"AGENT_HEARTBEAT_CRON": "0 9 * * *",
		"AGENT_SELFHEAL_RATE":  "0.25", "AGENT_RUN_TIMEOUT": "90s",
		"AGENT_ALLOW_PRIVATE_HTTP": "Wiki.local, 10.1.2.3/8,192.168.1.7,::1",
		"AGENT_PRICES":             `{"m":{"input":1,"output":2.5}}`, "AGENT_MAX_COST_USD": "0",
		"OPENAI_BASE_URL":  "http://127.0.0.1:9/v1",
		"AGENT_OIDC_ROLES": "groups=agents:admin, groups=support:approver",
	}
	before := maps.Clone(environ)
	c := load(t, environ)
	assert.NoDiff(t, before, environ)
	assert.NoDiff(t, []string{"groups=agents:admin", "groups=support:approver"}, c.OIDC.Roles)
	assert.Truef(t, !c.LanesEnabled && c.DatabaseURL.Reveal() == "postgres://a:b@h/d" && c.SelfHeal.FailureRate == 0.25 &&
		c.Budget.RunTimeout == 90*time.Second && c.Prices["m"] == (config.Price{Input: 1, Output: 2.5}) &&
		c.Budget.MaxCostUSD == 0, "got %+v", c)
	next := c.Heartbeat.Next(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))
	assert.Truef(t, next.UTC().Hour() == 8, "the heartbeat is at %v, not in its zone", next)
}

func TestListsHaveNoBlanksOrEmptyItems(t *testing.T) {
	t.Parallel()
	c := load(t, map[string]string{
		"AGENT_CHAT_KEY": "site=one-key,shop=other-key", "AGENT_CHAT_BROWSER_KEYS": "site, shop,",
		"AGENT_CHAT_EMBED_ORIGINS": "https://a.example , https://b.example", "AGENT_TRUSTED_PROXIES": "10.0.0.1, ,10.0.0.2",
		"AGENT_ALLOW_PRIVATE_HTTP": "wiki.local, wiki.local:8080,[::1],[::1]:80,",
	})
	for _, list := range [][2][]string{
		{c.Chat.BrowserKeys, {"site", "shop"}},
		{c.Chat.EmbedOrigins, {"https://a.example", "https://b.example"}},
		{c.ProxyList, {"10.0.0.1", "10.0.0.2"}},
		{c.PrivateHTTP, {"wiki.local", "wiki.local:8080", "[::1]", "[::1]:80"}},
	} {
		assert.NoDiff(t, list[1], list[0])
	}
	for _, bad := range []string{":80", "wiki.local:http", "http://wiki.local:80", "*.local:80"} {
		_, err := config.Load(map[string]string{"AGENT_ALLOW_PRIVATE_HTTP": bad})
		assert.Error(t, err, bad, "is taken")
	}
}

func TestNameIsCountedInCharacters(t *testing.T) {
	t.Parallel()
	load(t, map[string]string{"AGENT_NAME": strings.Repeat("é", 100)})
	_, err := config.Load(map[string]string{"AGENT_NAME": strings.Repeat("é", 101)})
	assert.Error(t, err)
}

func TestPricesFromAFile(t *testing.T) {
	c := load(t, map[string]string{"AGENT_PRICES": write(t, `{"m":{"input":3}}`)})
	assert.Equal(t, 3, c.Prices["m"].Input, c.Prices)
}

func TestPricesAreOneTableOfPositiveNumbers(t *testing.T) {
	for _, bad := range []string{
		`{"m":{"output":-1}}`, `{"m":{"cached":-1}}`, `{"m":{"long":{"over":9,"cache_write":-1}}}`, `{"m":{"input":1}}}`,
	} {
		_, err := config.Load(map[string]string{"AGENT_PRICES": bad})
		assert.Truef(t, err != nil && strings.Contains(err.Error(), "AGENT_PRICES"), "%s: %v", bad, err)
	}
}

// badValues are invalid values, each with a part of its error line.
var badValues = map[string]struct{ value, says string }{
	"DATABASE_URL": {"mysql://u:hunter2@h", "postgres://agent@localhost"},
	"DATABASE_DIRECT_URL": {"postgres://u:hunter2#x@h/d", "percent-encode special characters of the password " +
		"(@ is %40"},
	"DATABASE_READ_URL":             {"replica:5432", "postgres://agent@replica:5432/agent"},
	"AGENT_TEST_DATABASE_URL":       {"hunter2", "postgres://postgres@localhost"},
	"AGENT_PG_BIN":                  {"/no/such/dir", "not a directory"},
	"AGENT_PUBLIC_URL":              {"agent.example.com", "http or https"},
	"AGENT_NAME":                    {"a\x01b", "printable"},
	"AGENT_LISTEN":                  {"8080", "host:port"},
	"AGENT_ADMIN_TOKEN":             {"hunter2 x", "no HTTP header can carry"},
	"AGENT_CHAT_KEY":                {"hunter2\nx", "no HTTP header can carry"},
	"OPENAI_API_KEY":                {"hunter2…", "no HTTP header can carry"},
	"OPENAI_BASE_URL":               {"api.openai.com", "https://api.openai.com/v1"},
	"AGENT_PRICES":                  {`{"m":{"in":1}}`, "USD per million"},
	"AGENT_MODEL_API":               {"grpc", "none of auto, chat, responses"},
	"AGENT_REASONING_EFFORT":        {"hard", "none, minimal, low"},
	"AGENT_MODEL_HEADERS":           {`{"api key":"x"}`, "no header"},
	"AGENT_MODEL_QUERY":             {`["x"]`, "not a JSON object of texts"},
	"AGENT_MODEL_EXTRA":             {`{"a":1} }`, "not a JSON object"},
	"AGENT_EMBEDDING_MODEL":         {"a\x01b", "does not print"},
	"AGENT_EMBEDDING_BASE_URL":      {"localhost:11434", "not an http or https URL"},
	"AGENT_EMBEDDING_KEY":           {"hunter2…", "no HTTP header can carry"},
	"AGENT_LOG_LEVEL":               {"loud", "debug, info, warn or error"},
	"AGENT_LOG_FORMAT":              {"xml", "text or json"},
	"AGENT_LANES":                   {"maybe", "on or off"},
	"AGENT_HEARTBEAT_CRON":          {"0 0 31 2 *", "never run"},
	"AGENT_TIMEZONE":                {"Mars/Base", "Europe/Madrid"},
	"AGENT_WORKERS":                 {"many", "from 1 to 1000"},
	"AGENT_LIMITS":                  {"flow:a=1,page:b=2", "surface:webhook=20"},
	"AGENT_WORKER_LEASE":            {"500ms", "has a fraction of a second"},
	"AGENT_DRAIN_DELAY":             {"1h", "behind a load balancer"},
	"AGENT_SHUTDOWN_TIMEOUT":        {"-1s", "25s"},
	"AGENT_ALLOW_PRIVATE_HTTP":      {"http://wiki", "not a host"},
	"AGENT_TRUSTED_PROXIES":         {"proxy.local", "not an address or a network"},
	"AGENT_MAX_ITERATIONS":          {"0", "from 1 to 10000"},
	"AGENT_MAX_TOKENS":              {"-1", "0 is no bound"},
	"AGENT_MAX_COST_USD":            {"NaN", "US dollars"},
	"AGENT_RUN_TIMEOUT":             {"10", "for example 10m"},
	"AGENT_DOCUMENT_MAX_BYTES":      {"10", "from 1024"},
	"AGENT_OPERATE_IDLE":            {"1s", "from 10s"},
	"AGENT_CHAT_DOUBLE_TEXTING":     {"twice", "enqueue, reject or interrupt"},
	"AGENT_CHAT_RATE":               {"0", "from 1 to"},
	"AGENT_CHAT_BROWSER_KEYS":       {"nobody", "no chat key named"},
	"AGENT_OIDC_ISSUER":             {"login.example.com", "is not an address"},
	"AGENT_OIDC_CLIENT_ID":          {"an id", "no HTTP header can carry"},
	"AGENT_OIDC_CLIENT_SECRET":      {"hunter2…", "no HTTP header can carry"},
	"AGENT_OIDC_ROLES":              {"admins", "claim=value:role"},
	"AGENT_CHAT_EMBED_ORIGINS":      {"https://example.com/page", "is not an origin"},
	"AGENT_CHAT_MAX_BYTES":          {"10", "from 1024"},
	"AGENT_CHAT_APPROVAL_WAIT":      {"2h", "from 1s to 1h"},
	"AGENT_CONTEXT_TOKENS":          {"9", "from 1000"},
	"AGENT_BUDGET_DAY_TOKENS":       {"-1", "0 is no bound"},
	"AGENT_BUDGET_DAY_USD":          {"NaN", "0 is no bound"},
	"AGENT_BUDGET_HEARTBEAT_TOKENS": {"-1", "0 is no bound"},
	"AGENT_BUDGET_HEARTBEAT_USD":    {"NaN", "0 is no bound"},
	"AGENT_BUDGET_OPERATE_TOKENS":   {"-1", "0 is no bound"},
	"AGENT_BUDGET_OPERATE_USD":      {"NaN", "0 is no bound"},
	"AGENT_BUDGET_CHAT_TOKENS":      {"-1", "0 is no bound"},
	"AGENT_BUDGET_CHAT_USD":         {"NaN", "0 is no bound"},
	"AGENT_BUDGET_WEBHOOK_TOKENS":   {"-1", "0 is no bound"},
	"AGENT_BUDGET_WEBHOOK_USD":      {"NaN", "0 is no bound"},
	"AGENT_SELFHEAL_FAILURES":       {"0", "from 1 to 1000"},
	"AGENT_SELFHEAL_WINDOW":         {"3 days", "for example 72h"},
	"AGENT_SELFHEAL_RATE":           {"1.5", "up to 1"},
	"AGENT_SELFHEAL_RATE_CALLS":     {"x", "from 1 to"},
	"AGENT_SELFHEAL_COOLDOWN":       {"-1h", "for example 24h"},
}

func TestInvalidValues(t *testing.T) {
	for name, c := range badValues {
		t.Run(name, func(t *testing.T) {
			_, err := config.Load(map[string]string{name: c.value})
			lines := problems(t, err)
			assert.Truef(t, len(lines) == 1 && strings.HasPrefix(lines[0], name+": ") && strings.Contains(lines[0], c.says) &&
				strings.Contains(lines[0], "set "), "got %q, want one line of %s that says %q", lines, name, c.says)
			assert.Truef(t, !strings.Contains(err.Error(), "hunter2") && !strings.Contains(err.Error(), "\n"),
				"the error shows a secret or has several lines: %q", err)
		})
	}
}

func TestAllInvalidValuesAreReported(t *testing.T) {
	environ := map[string]string{}
	for name, c := range badValues {
		environ[name] = c.value
	}
	_, err := config.Load(environ)
	lines := problems(t, err)
	assert.Equal(t, len(badValues), len(lines), err)
	_, again := config.Load(environ)
	assert.Equal(t, again.Error(), err.Error(), "the lines come in another order each time")
}

// Every setting needs a line in the table of invalid values, except those that accept any text.
func TestEverySettingIsValidated(t *testing.T) {
	for _, s := range config.Settings() {
		_, checked := badValues[s.Name]
		assert.Truef(t, checked || s.Name == "AGENT_MODEL", "%s takes anything", s.Name)
		assert.Truef(t, s.Help != "", "%s has no help", s.Name)
		if s.Default != "" {
			_, err := config.Load(map[string]string{s.Name: "\x01 x"})
			lines := problems(t, err)
			assert.Truef(t, len(lines) == 1 && strings.HasPrefix(lines[0], s.Name+": "), "%s of a wrong type: %q", s.Name, lines)
		}
	}
}

func TestExtraKeepsModelAndMessagesOfRequests(t *testing.T) {
	for _, name := range []string{"model", "messages", "input", "n"} {
		_, err := config.Load(map[string]string{"AGENT_MODEL_EXTRA": `{"` + name + `":null}`})
		lines := problems(t, err)
		assert.Truef(t, len(lines) == 1 && strings.Contains(lines[0], "has the member "+name+";"), "%s: %q", name, lines)
	}
}

func TestSecretsFromFiles(t *testing.T) {
	for _, name := range []string{
		"DATABASE_URL", "DATABASE_DIRECT_URL", "DATABASE_READ_URL", "AGENT_ADMIN_TOKEN",
		"OPENAI_API_KEY", "AGENT_CHAT_KEY",
	} {
		t.Run(name, func(t *testing.T) {
			const value = "postgres://u:hunter2@h/d"
			c := load(t, map[string]string{name + "_FILE": write(t, value+"\n")})
			got := map[string]config.Secret{
				"DATABASE_URL": c.DatabaseURL, "DATABASE_DIRECT_URL": c.DirectURL, "DATABASE_READ_URL": c.ReadURL,
				"AGENT_ADMIN_TOKEN": c.AdminToken, "OPENAI_API_KEY": c.OpenAIKey, "AGENT_CHAT_KEY": c.ChatKey,
			}[name]
			if got.Reveal() != value || len(c.Unknown) != 0 {
				t.Errorf("got %q, warnings %v", got.Reveal(), c.Unknown)
			}
			for says, environ := range map[string]map[string]string{
				"both set":      {name: value, name + "_FILE": write(t, value)},
				"no such file":  {name + "_FILE": "/no/such/file"},
				"file is empty": {name + "_FILE": write(t, "\n")},
			} {
				_, err := config.Load(environ)
				lines := problems(t, err)
				says = strings.TrimPrefix(says, "file ")
				assert.Truef(t, len(lines) == 1 && strings.Contains(lines[0], name+"_FILE") && strings.Contains(lines[0], says) &&
					!strings.Contains(lines[0], "hunter2"), "got %q, want one that says %q", lines, says)
			}
		})
	}
}

func TestUnknownVariables(t *testing.T) {
	c, err := config.Load(map[string]string{
		"AGENT_LISTN": "x", "AGENT_SELF_HEAL_RATE": "1", "AGENT_SOMETHING_ELSE": "1", "AGENT_EXTRA": "1", "PATH": "/bin",
		"AGENT_ADMIN_TOKEN_FILE": "", "AGENT_UNSET": "",
	}, "AGENT_EXTRA")
	require.NoError(t, err)
	want := []string{
		"AGENT_LISTN is not a setting; did you mean AGENT_LISTEN?",
		"AGENT_SELF_HEAL_RATE is not a setting; did you mean AGENT_SELFHEAL_RATE?",
		"AGENT_SOMETHING_ELSE is not a setting",
	}
	assert.NoDiff(t, want, c.Unknown)
}

func TestRequire(t *testing.T) {
	const dsn, token = "postgres://h/d", "0123456789abcdef"
	for name, c := range map[string]struct {
		environ    map[string]string
		serve, dev []string // the beginning of each line
	}{
		"nothing": {nil, []string{"DATABASE_URL is not set", "AGENT_ADMIN_TOKEN is not set"}, nil},
		"all": {map[string]string{"DATABASE_URL": dsn, "AGENT_ADMIN_TOKEN": token, "AGENT_CHAT_KEY": token + "2,shop=" +
			token + "3"}, nil, nil},
		"open, no token": {
			map[string]string{"DATABASE_URL": dsn, "AGENT_LISTEN": ":8080"},
			[]string{"AGENT_ADMIN_TOKEN is not set"},
			[]string{"AGENT_LISTEN: :8080 can be reached"},
		},
		"weak": {
			map[string]string{
				"DATABASE_URL": dsn, "AGENT_ADMIN_TOKEN": "short",
				"AGENT_CHAT_KEY": "k,shop=abababababababab,blog=" + token,
			},
			[]string{
				"AGENT_ADMIN_TOKEN: it has fewer than 16", "AGENT_CHAT_KEY: the key shop: it has fewer than 8",
				"AGENT_CHAT_KEY: the key visitor: it has fewer than 16",
			},
			[]string{
				"AGENT_ADMIN_TOKEN: it has fewer than 16", "AGENT_CHAT_KEY: the key shop: it has fewer than 8",
				"AGENT_CHAT_KEY: the key visitor: it has fewer than 16",
			},
		},
		"token of a principal": {
			map[string]string{"DATABASE_URL": dsn, "AGENT_ADMIN_TOKEN": "lk_" + token},
			[]string{"AGENT_ADMIN_TOKEN: it begins with lk_"},
			[]string{"AGENT_ADMIN_TOKEN: it begins with lk_"},
		},
		"open, token": {
			map[string]string{"DATABASE_URL": dsn, "AGENT_LISTEN": "[::]:80", "AGENT_ADMIN_TOKEN": token},
			nil,
			nil,
		},
		"localhost": {
			map[string]string{"DATABASE_URL": dsn, "AGENT_LISTEN": "localhost:0", "AGENT_ADMIN_TOKEN": token},
			nil, nil,
		},
		"loopback IPv6": {
			map[string]string{"DATABASE_URL": dsn, "AGENT_LISTEN": "[::1]:80", "AGENT_ADMIN_TOKEN": token},
			nil,
			nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := load(t, c.environ)
			for kind, one := range map[string]struct {
				err  error
				want []string
			}{"serve": {cfg.RequireServe(), c.serve}, "dev": {cfg.RequireDev(), c.dev}} {
				if one.err == nil && one.want == nil {
					continue
				}
				lines := problems(t, one.err)
				if len(lines) != len(one.want) {
					t.Errorf("%s: got %q, want %q", kind, lines, one.want)
					continue
				}
				for i := range lines {
					weak := strings.Contains(lines[i], "has fewer")
					assert.Truef(t, strings.HasPrefix(lines[i], one.want[i]) && strings.Contains(lines[i], "set ") &&
						(!weak || strings.Contains(lines[i], "openssl rand -hex 32")), "%s: got %q, want %q", kind, lines[i], one.want[i])
				}
			}
		})
	}
}

func TestRequireReportsAllProblems(t *testing.T) {
	for name, c := range map[string]struct {
		environ map[string]string
		want    []string
	}{
		"both": {
			map[string]string{"AGENT_WORKERS": "0"},
			[]string{"AGENT_WORKERS: ", "DATABASE_URL is not set", "AGENT_ADMIN_TOKEN is not set"},
		},
		"one is wrong": {
			map[string]string{"DATABASE_URL": "mysql://h/d", "AGENT_ADMIN_TOKEN": " "},
			[]string{"DATABASE_URL: ", "AGENT_ADMIN_TOKEN is not set"},
		},
		"one in a file": {
			map[string]string{"DATABASE_URL": "postgres://h/d", "AGENT_ADMIN_TOKEN_FILE": "/none"},
			[]string{"AGENT_ADMIN_TOKEN_FILE: "},
		},
		"nothing amiss":  {map[string]string{"DATABASE_URL": "postgres://h/d", "AGENT_ADMIN_TOKEN": "t"}, nil},
		"only not there": {nil, nil}, // RequireServe reports the error
	} {
		t.Run(name, func(t *testing.T) {
			_, err := config.LoadServe(c.environ)
			var lines []string
			if err != nil {
				lines = problems(t, err)
			}
			require.Equal(t, len(c.want), len(lines), lines, c.want)
			for i := range lines {
				assert.Truef(t, strings.HasPrefix(lines[i], c.want[i]), "got %q, want %q", lines[i], c.want[i])
			}
		})
	}
}

func TestSecretsAreHidden(t *testing.T) {
	c := load(t, map[string]string{"DATABASE_URL": "postgres://u:hunter2@h/d", "AGENT_ADMIN_TOKEN": "hunter2"})
	marshalled, err := json.Marshal(map[string]any{"s": c.AdminToken, "c": c.AdminToken})
	require.NoError(t, err)
	var log bytes.Buffer
	slog.New(slog.NewTextHandler(&log, nil)).InfoContext(t.Context(), "m", "s", c.AdminToken, "c", c)
	all := fmt.Sprint(c.AdminToken, c) + fmt.Sprintf("%v %+v %#v %s %q %s %x", c, c, c, c.AdminToken, c.AdminToken,
		marshalled, c.AdminToken) + log.String()
	assert.True(t, !strings.Contains(all, "hunter2") && !strings.Contains(all, "68756e74657232") &&
		strings.Contains(all, "***"), all)
	assert.True(t, c.AdminToken.Reveal() == "hunter2" && c.AdminToken.IsSet() && !config.Secret("").IsSet() &&
		config.Secret("").String() == "", "Reveal does not reveal")
}

func TestDotEnvNeverOverridesTheEnvironment(t *testing.T) {
	path := write(t, "\ufeff# comment\nAGENT_NAME=fromfile\nAGENT_MODEL=\"a model\"\nOPENAI_API_KEY=filekey\n")
	environ := map[string]string{"AGENT_NAME": "real", "OPENAI_API_KEY_FILE": "/run/secret"}
	file, err := config.LoadDotEnv(path, environ, isForeign)
	require.NoError(t, err)
	got := file.Environ
	want := map[string]string{"AGENT_NAME": "real", "AGENT_MODEL": "a model", "OPENAI_API_KEY_FILE": "/run/secret"}
	assert.NoDiff(t, want, got)
	assert.Equal(t, 2, len(environ), environ)
}

func TestDotEnvMissingAndBroken(t *testing.T) {
	got, err := config.LoadDotEnv(filepath.Join(t.TempDir(), ".env"), nil, isForeign)
	assert.Truef(t, err == nil && got.Environ != nil && len(got.Environ)+len(got.Set)+len(got.Ignored) == 0,
		"a missing file: %v, %v", got, err)
	_, err = config.LoadDotEnv(write(t, "KEY hunter2\n=x"), nil, isForeign)
	assert.Truef(t, err != nil && !strings.Contains(err.Error(), "hunter2"), "a broken file: %v", err)
	_, err = config.LoadDotEnv(t.TempDir(), nil, isForeign)
	assert.Error(t, err, "a directory passes for a file")
}

// isForeign reports whether a setting is OpenTelemetry's.
func isForeign(name string) bool { return strings.HasPrefix(name, "OTEL_") }

func TestDotEnvRestrictions(t *testing.T) {
	const headers, foreign = "OTEL_EXPORTER_OTLP_HEADERS", "http://127.0.0.1:9"
	for name, c := range map[string]struct {
		file, environ string // of environ, a name=value
		problems      int
		set, ignored  []string
	}{
		"programs": {
			"AGENT_PG_BIN=/tmp\nPATH=/tmp\nHOME=/tmp\nLANG=x\nAGENT_MODEL=m", "", 0,
			[]string{"AGENT_MODEL"},
			[]string{"AGENT_PG_BIN", "HOME", "LANG", "PATH"},
		},
		"files": {
			"OPENAI_API_KEY_FILE=/etc/passwd\nMY_FILE=/x", "", 0, nil, []string{"MY_FILE", "OPENAI_API_KEY_FILE"},
		},
		"a misspelt setting":   {"AGENT_MODELL=m", "", 0, nil, []string{"AGENT_MODELL"}},
		"a reference":          {"LD_PRELOAD=x\nMY_SECRET=y", "", 0, []string{"LD_PRELOAD", "MY_SECRET"}, nil},
		"model, key elsewhere": {"OPENAI_BASE_URL=" + foreign, "OPENAI_API_KEY=k", 1, []string{"OPENAI_BASE_URL"}, nil},
		"model, key in a file": {"OPENAI_BASE_URL=" + foreign, "OPENAI_API_KEY_FILE=/k", 1, []string{"OPENAI_BASE_URL"}, nil},
		"model, key shadowed": {
			"OPENAI_BASE_URL=" + foreign + "\nOPENAI_API_KEY=mine", "OPENAI_API_KEY=k", 1,
			[]string{"OPENAI_BASE_URL"},
			nil,
		},
		"model and key": {
			"OPENAI_BASE_URL=" + foreign + "\nOPENAI_API_KEY=k", "", 0,
			[]string{"OPENAI_API_KEY", "OPENAI_BASE_URL"},
			nil,
		},
		"key, model elsewhere": {"OPENAI_API_KEY=k", "OPENAI_BASE_URL=" + foreign, 0, []string{"OPENAI_API_KEY"}, nil},
		"receiver of traces": {
			"OTEL_EXPORTER_OTLP_ENDPOINT=" + foreign, headers + "=a=b", 1,
			[]string{"OTEL_EXPORTER_OTLP_ENDPOINT"},
			nil,
		},
		"model, header elsewhere": {
			"OPENAI_BASE_URL=" + foreign, "AGENT_MODEL_HEADERS={}", 1, []string{"OPENAI_BASE_URL"}, nil,
		},
		"model, query elsewhere": {
			"OPENAI_BASE_URL=" + foreign, "AGENT_MODEL_QUERY={}", 1, []string{"OPENAI_BASE_URL"}, nil,
		},
		"embeddings, key elsewhere": {
			"AGENT_EMBEDDING_BASE_URL=" + foreign, "AGENT_EMBEDDING_KEY=k", 1, []string{"AGENT_EMBEDDING_BASE_URL"}, nil,
		},
		"embeddings by the model's server": {
			"OPENAI_BASE_URL=" + foreign, "AGENT_EMBEDDING_KEY=k", 1, []string{"OPENAI_BASE_URL"}, nil,
		},
		"issuer, secret elsewhere": {
			"AGENT_OIDC_ISSUER=" + foreign, "AGENT_OIDC_CLIENT_SECRET=s", 1, []string{"AGENT_OIDC_ISSUER"}, nil,
		},
		"database":              {"DATABASE_URL=postgres://a@h/d", "PGPASSWORD=p", 1, []string{"DATABASE_URL"}, nil},
		"database and password": {"DATABASE_URL=postgres://a:b@h/d", "PGPASSWORD=p", 0, []string{"DATABASE_URL"}, nil},
		"a port for all":        {"AGENT_LISTEN=:8080", "", 1, []string{"AGENT_LISTEN"}, nil},
		"a port for here":       {"AGENT_LISTEN=127.0.0.1:8081", "", 0, []string{"AGENT_LISTEN"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			file, err := config.LoadDotEnv(write(t, c.file+"\n"), config.Environ([]string{c.environ}), isForeign)
			n := 0
			if err != nil {
				n = len(problems(t, err))
			}
			assert.Truef(t, n == c.problems && slices.Equal(file.Set, c.set) && slices.Equal(file.Ignored, c.ignored),
				"set %v, ignored %v, error %v", file.Set, file.Ignored, err)
			for _, reference := range []string{"LD_PRELOAD", "MY_SECRET"} {
				assert.Equal(t, "", file.Environ[reference], reference)
			}
		})
	}
}

func TestEnviron(t *testing.T) {
	got := config.Environ([]string{"A=1", "B=x=y", "C=", "nonsense"})
	assert.NoDiff(t, map[string]string{"A": "1", "B": "x=y", "C": ""}, got)
}

func TestChatKeysByName(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want map[string]string
	}{
		"none":        {"", map[string]string{}},
		"one":         {"k-1", map[string]string{"visitor": "k-1"}},
		"base64":      {"a2V5Cg==", map[string]string{"visitor": "a2V5Cg=="}},
		"base64, one": {"a2V5=", map[string]string{"visitor": "a2V5="}},
		"named":       {"shop=k-1,blog=k2==", map[string]string{"shop": "k-1", "blog": "k2=="}},
		"mixed":       {"k-0,shop=k-1", map[string]string{"visitor": "k-0", "shop": "k-1"}},
	} {
		t.Run(name, func(t *testing.T) {
			got := map[string]string{}
			for who, key := range load(t, map[string]string{"AGENT_CHAT_KEY": c.text}).ChatKeys {
				got[who] = key.Reveal()
			}
			assert.NoDiff(t, c.want, got)
		})
	}
}

func TestChatKeysAreDistinct(t *testing.T) {
	for name, text := range map[string]string{
		"the admin token": "hunter2", "among names": "shop=hunter2", "twice": "a=k-1,b=k-1", "a name twice": "a=k-1,a=k-2",
		"a name with a colon": "a:b=hunter2", "a name in capitals": "k-1,Shop=hunter2", "no name": "=hunter2",
		"a name too long": strings.Repeat("a", 33) + "=hunter2",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := config.Load(map[string]string{"AGENT_CHAT_KEY": text, "AGENT_ADMIN_TOKEN": "hunter2"})
			lines := problems(t, err)
			assert.Truef(t, len(lines) == 1 && !strings.Contains(lines[0], "hunter2"), "got %q", lines)
		})
	}
}

// docs/settings.md comes from the same table as the error lines.
func TestSettingsPageIsComplete(t *testing.T) {
	text, err := os.ReadFile("../../docs/settings.md")
	require.NoError(t, err)
	for _, s := range config.Settings() {
		value := s.Default
		if value != "" {
			value = "`" + value + "`"
		}
		assert.Contains(t, string(text), fmt.Sprintf("| `%s` | %s | %s |\n", s.Name, value, s.Help))
	}
}

func TestEmbeddingModelRequiresServer(t *testing.T) {
	for setting, complains := range map[string]bool{
		"AGENT_NAME=x": true, "OPENAI_API_KEY=hunter2": false, "OPENAI_BASE_URL=http://h/v1": false,
		"AGENT_EMBEDDING_BASE_URL=http://h/v1": false,
	} {
		_, err := config.Load(config.Environ([]string{"AGENT_EMBEDDING_MODEL=small", setting}))
		assert.Equal(t, complains, err != nil &&
			strings.Contains(err.Error(), "set AGENT_EMBEDDING_BASE_URL too"), setting, err)
	}
}

func TestLimitsOfRuns(t *testing.T) {
	t.Parallel()
	got := load(t, map[string]string{"AGENT_LIMITS": "flow:external:x=5, surface:webhook=0,surface:eval=2,"}).Admission
	want := []config.Admission{
		{Kind: "flow", Name: "external:x", Running: 5},
		{Kind: "surface", Name: "webhook", Running: 0},
		{Kind: "surface", Name: "eval", Running: 2},
	}
	assert.Truef(t, slices.Equal(got, want), "got %v, want %v", got, want)
	for _, bad := range []string{
		"flow:a", "flow=1", "flow:=1", "a=1", "flow:a=-1", "flow:a=1.5", "surface:nowhere=1",
		"flow:a=1,flow:a=2",
	} {
		_, err := config.Load(map[string]string{"AGENT_LIMITS": bad})
		assert.Error(t, err, bad, "is taken")
	}
}
