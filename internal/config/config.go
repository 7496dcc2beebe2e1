// Package config reads the program's settings from the environment.
//
// [Load] reads all settings and reports a problem of each wrong one, in a line with its fix. The result is validated:
// a schedule parses, a time zone exists, a limit is in range. Required settings depend on the command
// ([Config.RequireServe], [Config.RequireDev]).
//
// An empty variable counts as unset. A secret may be in a file named by the variable with the suffix _FILE, as
// container platforms provide them. A [Secret] masks itself in logs, messages and JSON; [Secret.Reveal] returns the
// text. [Config.Unknown] warns about each unknown AGENT_ variable, which is probably misspelt.
//
// The caller passes the environment, so tests need not change the process.
package config

import (
	"encoding/json"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/clientip"
	"github.com/lanekeeper/lanekeeper/internal/schedule"
)

// Config holds the settings of one process. The tags document variable, default and values.
type Config struct {
	DatabaseURL     Secret `env:"DATABASE_URL" help:"the database, for example postgres://agent@localhost:5432/agent"`
	DirectURL       Secret `env:"DATABASE_DIRECT_URL" help:"the same database without the connection pooler that DATABASE_URL names, for notifications and migrations, for example postgres://agent@localhost:5432/agent"`
	ReadURL         Secret `env:"DATABASE_READ_URL" help:"a streaming standby of the database that DATABASE_URL names, for pages and questions, for example postgres://agent@replica:5432/agent"`
	TestDatabaseURL Secret `env:"AGENT_TEST_DATABASE_URL" help:"a server on which tests may create databases, for example postgres://postgres@localhost:5432/postgres"`
	PGBin           string `env:"AGENT_PG_BIN" help:"the directory of PostgreSQL's server programs, for example /usr/lib/postgresql/15/bin"`

	PublicURL  string `env:"AGENT_PUBLIC_URL" help:"where people reach the agent, for links in messages, for example https://agent.example.com"`
	Name       string `env:"AGENT_NAME" envDefault:"agent" help:"the agent's name in the activity log, up to 100 printable characters"`
	Listen     string `env:"AGENT_LISTEN" envDefault:"127.0.0.1:8080" help:"host:port, for example 127.0.0.1:8080"`
	AdminToken Secret `env:"AGENT_ADMIN_TOKEN" help:"a long random text, for example from: openssl rand -hex 32"`
	ChatKey    Secret `env:"AGENT_CHAT_KEY" help:"a long random text that chat clients send, for example from: openssl rand -hex 32, or several as name=text,name=text; without it the chat answers 401"`
	OIDC       OIDC
	ProxyList  []string `env:"AGENT_TRUSTED_PROXIES" help:"the addresses or networks of the proxies whose X-Forwarded-For says where a request comes from, for example 10.0.0.0/8; without it that is the connection's address"`

	OpenAIKey     Secret `env:"OPENAI_API_KEY" help:"the key of the model's provider"`
	OpenAIBaseURL string `env:"OPENAI_BASE_URL" help:"the URL of an OpenAI-compatible API, for example https://api.openai.com/v1"`
	Model         string `env:"AGENT_MODEL" help:"the model's name at its provider"`
	PricesSource  string `env:"AGENT_PRICES" help:"USD per million tokens, as JSON or a file of it: {\"gpt-4o\":{\"input\":2.5,\"output\":10}}"`

	Provider  Provider
	Embedding Embedding

	LogLevel  string `env:"AGENT_LOG_LEVEL" envDefault:"info" help:"debug, info, warn or error"`
	LogFormat string `env:"AGENT_LOG_FORMAT" envDefault:"text" help:"text or json"`

	LanesEnabled  bool   `env:"AGENT_LANES" envDefault:"on" help:"on or off; off is for local use only"`
	HeartbeatCron string `env:"AGENT_HEARTBEAT_CRON" envDefault:"*/30 * * * *" help:"a cron expression, for example */30 * * * *; the same in every process, because the one that starts last sets it"`
	Timezone      string `env:"AGENT_TIMEZONE" envDefault:"UTC" help:"an IANA time zone, for example Europe/Madrid"`

	Workers         int           `env:"AGENT_WORKERS" envDefault:"10" help:"how many background executions run at once, from 1 to 1000"`
	RunLimits       []string      `env:"AGENT_LIMITS" help:"how many runs of a flow or surface go on at once, for example flow:onboarding=5,surface:webhook=20; others wait in the queue, but turns over HTTP and runs of commands start at once. Give every process the same value: the process that starts last sets all limits, also in place of set_agent_limits"`
	WorkerLease     time.Duration `env:"AGENT_WORKER_LEASE" envDefault:"30s" help:"how long a worker may be silent before its work goes elsewhere, in whole seconds from 1s to 10m"`
	DrainDelay      time.Duration `env:"AGENT_DRAIN_DELAY" envDefault:"0s" help:"how long a process that is being stopped goes on serving while it says that it is not ready, for example 5s behind a load balancer"`
	ShutdownTimeout time.Duration `env:"AGENT_SHUTDOWN_TIMEOUT" envDefault:"25s" help:"how long requests under way may take to end at a stop, and after them running steps, for example 25s"`
	PrivateHTTP     []string      `env:"AGENT_ALLOW_PRIVATE_HTTP" help:"private hosts, addresses or networks that http: skills may reach, for example wiki.local,db.local:8080,10.0.0.0/8"`

	DocumentMaxBytes int `env:"AGENT_DOCUMENT_MAX_BYTES" envDefault:"10485760" help:"how large a document may be that admins and visitors upload, in bytes from 1024 to 33554432"`

	Operate  Operate
	Chat     Chat
	Budget   Budget
	Limits   Limits
	SelfHeal SelfHeal

	// The fields below are derived from the settings above.

	Heartbeat schedule.Schedule `env:"-"` // HeartbeatCron in Timezone
	Location  *time.Location    `env:"-"` // Timezone
	Prices    map[string]Price  `env:"-"` // by model; empty when AGENT_PRICES is not set
	Admission []Admission       `env:"-"` // RunLimits
	Proxies   clientip.Trusted  `env:"-"` // ProxyList
	ChatKeys  map[string]Secret `env:"-"` // ChatKey by name; a key without a name is called visitor
	Unknown   []string          `env:"-"` // one warning for each AGENT_ variable without a reader
}

// Admission limits concurrent executions of a flow or a surface.
type Admission struct {
	Kind, Name string // Kind is flow or surface
	Running    int
}

// Provider configures the connection to the model server.
type Provider struct {
	API         string `env:"AGENT_MODEL_API" envDefault:"auto" help:"the protocol of the model's server: auto, chat or responses"`
	Effort      string `env:"AGENT_REASONING_EFFORT" help:"how much models that reason think: none, minimal, low, medium, high, xhigh or max; the model's own when not set"`
	HeadersJSON Secret `env:"AGENT_MODEL_HEADERS" help:"further headers for the model's server, as JSON, for example {\"api-key\":\"…\"}"`
	QueryJSON   Secret `env:"AGENT_MODEL_QUERY" help:"query parameters for the model's server, as JSON, for example {\"api-version\":\"2026-10-01\"}"`
	ExtraJSON   string `env:"AGENT_MODEL_EXTRA" help:"what is merged into each request to the model, as JSON, except model, messages, input and n, for example {\"chat_template_kwargs\":{\"enable_thinking\":false}}"`

	Headers map[string]string          `env:"-"` // HeadersJSON
	Query   map[string]string          `env:"-"` // QueryJSON
	Extra   map[string]json.RawMessage `env:"-"` // ExtraJSON
}

// Embedding configures the model for semantic memory search.
type Embedding struct {
	Model   string `env:"AGENT_EMBEDDING_MODEL" help:"the embedding model that lets memories be found by meaning, for example text-embedding-3-small; memories are found by words alone when not set"`
	BaseURL string `env:"AGENT_EMBEDDING_BASE_URL" help:"the URL of the embedding model's server, for example http://127.0.0.1:11434/v1; OPENAI_BASE_URL when not set"`
	Key     Secret `env:"AGENT_EMBEDDING_KEY" help:"the key of the embedding model's server; OPENAI_API_KEY when AGENT_EMBEDDING_BASE_URL is not set either"`
}

// OIDC configures the login of people at an OpenID Connect issuer.
type OIDC struct {
	Issuer       string   `env:"AGENT_OIDC_ISSUER" help:"the issuer where people log in to the Engine Room, for example https://login.example.com"`
	ClientID     string   `env:"AGENT_OIDC_CLIENT_ID" help:"the agent's client id there; its redirect URI is AGENT_PUBLIC_URL with /login/oidc/callback"`
	ClientSecret Secret   `env:"AGENT_OIDC_CLIENT_SECRET" help:"the secret of the client"`
	Roles        []string `env:"AGENT_OIDC_ROLES" help:"the roles of accounts, as claim=value:role, for example groups=agents:admin,groups=support:approver; without a match an account has none"`
}

// Operate configures admin sessions.
type Operate struct {
	Idle time.Duration `env:"AGENT_OPERATE_IDLE" envDefault:"5m" help:"how long an idle admin keeps heartbeats away, from 10s to 24h"`
}

// Chat configures the chat for visitors.
type Chat struct {
	DoubleTexting string        `env:"AGENT_CHAT_DOUBLE_TEXTING" envDefault:"enqueue" help:"what a message means while another is answered: enqueue, reject or interrupt"`
	Rate          int           `env:"AGENT_CHAT_RATE" envDefault:"30" help:"how many messages a visitor may send in a minute, a third of them at once, from 1 to 100000"`
	MaxBytes      int           `env:"AGENT_CHAT_MAX_BYTES" envDefault:"4194304" help:"how large a request may be, with the history that clients send along, in bytes from 1024 to 16777216"`
	BrowserKeys   []string      `env:"AGENT_CHAT_BROWSER_KEYS" help:"names of the chat keys that browsers hold: each visitor of such a key gets a token of its own, so that they cannot read each other; for example site,shop (a key without a name is called visitor)"`
	EmbedOrigins  []string      `env:"AGENT_CHAT_EMBED_ORIGINS" help:"sites that may show the chat page in a frame, for example https://example.com,https://shop.example.com"`
	ApprovalWait  time.Duration `env:"AGENT_CHAT_APPROVAL_WAIT" envDefault:"2m" help:"how long a visitor's connection waits for an approval, from 1s to 1h"`
}

// Budget limits one run. Zero tokens or money means no limit.
type Budget struct {
	MaxIterations int           `env:"AGENT_MAX_ITERATIONS" envDefault:"25" help:"how many model calls one run may make, from 1 to 10000"`
	MaxTokens     int           `env:"AGENT_MAX_TOKENS" envDefault:"200000" help:"how many tokens one run may use; 0 is no bound"`
	MaxCostUSD    float64       `env:"AGENT_MAX_COST_USD" envDefault:"1" help:"how many US dollars one run may cost; 0 is no bound"`
	RunTimeout    time.Duration `env:"AGENT_RUN_TIMEOUT" envDefault:"10m" help:"how long one run may take, for example 10m"`
	ContextTokens int           `env:"AGENT_CONTEXT_TOKENS" envDefault:"60000" help:"how many tokens the model is shown at once, from 1000 to 10000000"`
}

// Limits apply per day (UTC), in total and by surface. Zero means no limit.
type Limits struct {
	DayTokens       int     `env:"AGENT_BUDGET_DAY_TOKENS" envDefault:"0" help:"how many tokens all surfaces together may use in a day; 0 is no bound"`
	DayUSD          float64 `env:"AGENT_BUDGET_DAY_USD" envDefault:"0" help:"how many US dollars all surfaces together may cost in a day; 0 is no bound"`
	HeartbeatTokens int     `env:"AGENT_BUDGET_HEARTBEAT_TOKENS" envDefault:"0" help:"how many tokens heartbeats may use in a day; 0 is no bound"`
	HeartbeatUSD    float64 `env:"AGENT_BUDGET_HEARTBEAT_USD" envDefault:"0" help:"how many US dollars heartbeats may cost in a day; 0 is no bound"`
	OperateTokens   int     `env:"AGENT_BUDGET_OPERATE_TOKENS" envDefault:"0" help:"how many tokens admins may use in a day; 0 is no bound"`
	OperateUSD      float64 `env:"AGENT_BUDGET_OPERATE_USD" envDefault:"0" help:"how many US dollars admins may cost in a day; 0 is no bound"`
	ChatTokens      int     `env:"AGENT_BUDGET_CHAT_TOKENS" envDefault:"0" help:"how many tokens visitors may use in a day; 0 is no bound"`
	ChatUSD         float64 `env:"AGENT_BUDGET_CHAT_USD" envDefault:"0" help:"how many US dollars visitors may cost in a day; 0 is no bound"`
	WebhookTokens   int     `env:"AGENT_BUDGET_WEBHOOK_TOKENS" envDefault:"0" help:"how many tokens webhooks may use in a day; 0 is no bound"`
	WebhookUSD      float64 `env:"AGENT_BUDGET_WEBHOOK_USD" envDefault:"0" help:"how many US dollars webhooks may cost in a day; 0 is no bound"`
}

// SelfHeal is the rule that disables failing skills.
type SelfHeal struct {
	Failures    int           `env:"AGENT_SELFHEAL_FAILURES" envDefault:"3" help:"how many failed calls in a row disable a skill, from 1 to 1000"`
	Window      time.Duration `env:"AGENT_SELFHEAL_WINDOW" envDefault:"72h" help:"how far back calls count, for example 72h"`
	FailureRate float64       `env:"AGENT_SELFHEAL_RATE" envDefault:"0.5" help:"the failure rate that disables a skill, above 0 and up to 1"`
	RateCalls   int           `env:"AGENT_SELFHEAL_RATE_CALLS" envDefault:"20" help:"how many of the newest calls the rate covers, from 1 to 100000"`
	Cooldown    time.Duration `env:"AGENT_SELFHEAL_COOLDOWN" envDefault:"24h" help:"how long a disabled skill rests before one trial, for example 24h"`
}

// Price is in US dollars per million tokens.
type Price struct {
	Input      float64 `json:"input"`
	Cached     float64 `json:"cached"`      // of the cached part of the input; as Input if 0
	CacheWrite float64 `json:"cache_write"` // of the part that the provider caches for later; as Input if 0
	Output     float64 `json:"output"`
	Long       Long    `json:"long"`
}

// Long is the price of requests with a prompt over Over tokens; 0 means none.
type Long struct {
	Over       int     `json:"over"`
	Input      float64 `json:"input"`
	Cached     float64 `json:"cached"`      // as Input when 0
	CacheWrite float64 `json:"cache_write"` // as Input when 0
	Output     float64 `json:"output"`
}
