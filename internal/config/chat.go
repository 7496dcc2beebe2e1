package config

import (
	"regexp"
	"slices"
	"strings"
)

// namedKey is a chat key with a name before it. What ends in = signs, as base64 does, is a key without one.
var namedKey = regexp.MustCompile(`^([a-z][a-z0-9_-]{0,31})=([^=].*)$`)

// unnamed is the name of a chat key that has none.
const unnamed = "visitor"

// chat checks what belongs to visitors, and takes the keys apart.
func (k *checker) chat(c *Config) {
	if !slices.Contains([]string{"enqueue", "reject", "interrupt"}, c.Chat.DoubleTexting) {
		k.refuse("AGENT_CHAT_DOUBLE_TEXTING", "%q is not a way to answer", c.Chat.DoubleTexting)
	}
	c.ChatKeys = map[string]Secret{}
	seen := map[string]bool{c.AdminToken.Reveal(): c.AdminToken.IsSet()}
	for i, item := range strings.Split(c.ChatKey.Reveal(), ",") {
		name, key := unnamed, strings.TrimSpace(item)
		if parts := namedKey.FindStringSubmatch(key); parts != nil {
			name, key = parts[1], parts[2]
		}
		_, taken := c.ChatKeys[name]
		switch {
		case key == "":
		case name == unnamed && strings.Contains(strings.TrimRight(key, "="), "="):
			k.refuse("AGENT_CHAT_KEY", "item %d is not name=text: a name has up to 32 of a-z, 0-9, _ and -, and begins with a letter", i+1)
		case taken:
			k.refuse("AGENT_CHAT_KEY", "two keys are named %s", name)
		case seen[key]:
			k.refuse("AGENT_CHAT_KEY", "the key %s is also another's or the admin token", name)
		default:
			c.ChatKeys[name], seen[key] = Secret(key), true
		}
	}
	for _, name := range c.Chat.BrowserKeys {
		if _, known := c.ChatKeys[name]; !known {
			k.refuse("AGENT_CHAT_BROWSER_KEYS", "there is no chat key named %q in AGENT_CHAT_KEY", name)
		}
	}
}
