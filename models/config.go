package models

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
)

// DefaultBaseURL is OpenAI's endpoint.
const DefaultBaseURL = "https://api.openai.com/v1"

// Config configures a client. OpenAI needs only Model and a key.
type Config struct {
	BaseURL    string       // including /v1 or its equivalent; DefaultBaseURL when empty
	APIKey     string       // sent as a bearer token; empty for servers without one
	Model      string       // for requests without a model
	HTTPClient *http.Client // nil for Go's default transport; its Timeout would cut long streams
	Prices     Prices       // DefaultPrices() when nil
	Logger     *slog.Logger // slog.Default() when nil
	Retry      Retry
	// IdleTimeout bounds the silence within one attempt, from sending to the last byte; 5 minutes when zero.
	IdleTimeout time.Duration
	// ReasoningEffort goes to models that support it ("none", "low", …); omitted when empty.
	ReasoningEffort string
	// API is the protocol; [APIAuto] when empty.
	API API
	// Headers and Query go into each request. The client redacts their values from errors, from four characters on.
	Headers map[string]string
	Query   url.Values
	// Settings are the names of the caller's settings in errors.
	Settings Settings
	// Extra holds members to merge into the body of each request. A null removes a member.
	Extra map[string]json.RawMessage
}

// suspectBaseURL adds the setting that explains an error of a server with another protocol.
func (c Config) suspectBaseURL(err error) error {
	return fmt.Errorf("%w: is %s the base URL of a server with OpenAI's protocol?", err, c.Settings.BaseURL)
}

// Settings are the names of the settings for a [Config]. Zero fields take the names of the chat model's settings.
type Settings struct {
	BaseURL string // OPENAI_BASE_URL
	APIKey  string // OPENAI_API_KEY
	Model   string // AGENT_MODEL
}

// New returns a client, or all problems of the configuration. It opens no connection. It does not check Headers, Query
// and Extra.
func New(config Config) (*Client, error) {
	config = withDefaults(config)
	var problems []error
	if err := checkBaseURL(config.BaseURL, config.Settings); err != nil {
		problems = append(problems, err)
	}
	if strings.TrimSpace(config.Model) == "" {
		problems = append(problems, fmt.Errorf("no model is named: set %s", config.Settings.Model))
	}
	if strings.ContainsAny(config.APIKey, "\r\n\x00 ") {
		problems = append(problems,
			fmt.Errorf("the key contains blanks or line breaks: set %s to the key alone", config.Settings.APIKey))
	}
	if config.Retry.Attempts < 0 || config.Retry.Base < 0 || config.Retry.MaxWait < 0 || config.IdleTimeout < 0 {
		problems = append(problems, errors.New("attempts and times must not be negative"))
	}
	if !slices.Contains([]API{APIAuto, APIChat, APIResponses}, config.API) {
		problems = append(problems,
			fmt.Errorf("%q is no protocol: set AGENT_MODEL_API to auto, chat or responses", config.API))
	}
	if err := config.Prices.check(); err != nil {
		problems = append(problems, err)
	}
	if len(problems) > 0 {
		return nil, fmt.Errorf("configure model: %w", errors.Join(problems...))
	}
	return &Client{config: config, densities: map[string]density{}}, nil
}

func withDefaults(config Config) Config {
	config.BaseURL = cmp.Or(config.BaseURL, DefaultBaseURL)
	config.BaseURL = strings.TrimRight(config.BaseURL, "/")
	if config.HTTPClient == nil {
		config.HTTPClient = &http.Client{}
	}
	if config.Prices == nil {
		config.Prices = DefaultPrices()
	}
	if config.Logger == nil {
		config.Logger = slog.Default()
	}
	config.IdleTimeout = cmp.Or(config.IdleTimeout, 5*time.Minute)
	config.API = cmp.Or(config.API, APIAuto)
	config.Retry = config.Retry.withDefaults()
	config.Settings = Settings{
		BaseURL: cmp.Or(config.Settings.BaseURL, "OPENAI_BASE_URL"),
		APIKey:  cmp.Or(config.Settings.APIKey, "OPENAI_API_KEY"),
		Model:   cmp.Or(config.Settings.Model, "AGENT_MODEL"),
	}
	return config
}

// checkBaseURL rejects a URL that cannot work or would leak a secret into logs. Its errors omit the URL.
func checkBaseURL(text string, names Settings) error {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return fmt.Errorf("the base URL cannot be parsed: set %s to a URL such as %s", names.BaseURL, DefaultBaseURL)
	case u.Scheme != "http" && u.Scheme != "https", u.Hostname() == "":
		return fmt.Errorf("the base URL has no http or https host: set %s to a URL such as %s", names.BaseURL, DefaultBaseURL)
	case u.User != nil:
		return fmt.Errorf("the base URL contains credentials: move them to %s", names.APIKey)
	case u.RawQuery != "" || u.Fragment != "":
		return fmt.Errorf("the base URL has a query or a fragment: end %s with its path; "+
			"AGENT_MODEL_QUERY sets a query for OPENAI_BASE_URL", names.BaseURL)
	case strings.HasSuffix(u.Path, "/chat/completions"):
		return fmt.Errorf("the base URL names the route too: leave /chat/completions out of %s", names.BaseURL)
	case strings.HasSuffix(u.Path, "/responses"):
		return fmt.Errorf("the base URL names the route too: leave /responses out of %s", names.BaseURL)
	}
	return nil
}
