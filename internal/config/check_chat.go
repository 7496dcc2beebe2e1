package config

import (
	"net/url"
	"regexp"
	"slices"
	"strings"
)

// chat validates the chat settings and splits the keys.
func (k *checker) chat(c *Config) {
	if !slices.Contains([]string{"enqueue", "reject", "interrupt"}, c.Chat.DoubleTexting) {
		k.report("AGENT_CHAT_DOUBLE_TEXTING", "%q is not a way to answer", c.Chat.DoubleTexting)
	}
	c.ChatKeys = map[string]Secret{}
	seen := map[string]bool{c.AdminToken.Reveal(): c.AdminToken.IsSet()}
	for i, item := range strings.Split(c.ChatKey.Reveal(), ",") {
		name, key := defaultKeyName, strings.TrimSpace(item)
		if parts := namedKey.FindStringSubmatch(key); parts != nil {
			name, key = parts[1], parts[2]
		}
		_, taken := c.ChatKeys[name]
		switch {
		case key == "":
		case name == defaultKeyName && strings.Contains(strings.TrimRight(key, "="), "="):
			k.report("AGENT_CHAT_KEY", "item %d is not name=text: a name has up to 32 of a-z, 0-9, _ and -, and begins with a "+
				"letter", i+1)
		case taken:
			k.report("AGENT_CHAT_KEY", "two keys are named %s", name)
		case seen[key]:
			k.report("AGENT_CHAT_KEY", "the key %s is also another's or the admin token", name)
		default:
			c.ChatKeys[name], seen[key] = Secret(key), true
		}
	}
	k.oidc(c.OIDC)
	for _, origin := range c.Chat.EmbedOrigins {
		u, err := url.Parse(origin)
		if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.Scheme+"://"+u.Host != origin ||
			strings.ContainsAny(origin, " ;'\"") {
			k.report("AGENT_CHAT_EMBED_ORIGINS", "%q is not an origin; give scheme and host, such as https://example.com",
				origin)
		}
	}
	for _, name := range c.Chat.BrowserKeys {
		if _, known := c.ChatKeys[name]; !known {
			k.report("AGENT_CHAT_BROWSER_KEYS", "there is no chat key named %q in AGENT_CHAT_KEY", name)
		}
	}
}

// namedKey matches NAME=KEY. A key may end in =, as base64 does.
var namedKey = regexp.MustCompile(`^([a-z][a-z0-9_-]{0,31})=([^=].*)$`)

const defaultKeyName = "visitor"

// oidc validates the login at an issuer.
func (k *checker) oidc(o OIDC) {
	u, err := url.Parse(o.Issuer)
	switch {
	case o.Issuer == "":
	case err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "":
		k.report("AGENT_OIDC_ISSUER", "%q is not an address; give the issuer, such as https://login.example.com", o.Issuer)
	case o.ClientID == "":
		k.report("AGENT_OIDC_CLIENT_ID", "it is not set; AGENT_OIDC_ISSUER needs it")
	}
	k.token("AGENT_OIDC_CLIENT_ID", Secret(o.ClientID))
	k.token("AGENT_OIDC_CLIENT_SECRET", o.ClientSecret)
	for _, text := range o.Roles {
		if !claimRole.MatchString(text) {
			k.report("AGENT_OIDC_ROLES", "%q is not claim=value:role with a role of viewer, operator, approver or admin", text)
		}
	}
}

var claimRole = regexp.MustCompile(`^[^=:]+=.+:(viewer|operator|approver|admin)$`)
