package channels

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/mail"
	"net/netip"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/fielderr"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// The types of channels.
const (
	Telegram = "telegram"
	Slack    = "slack"
	Email    = "email"
)

// Pairing determines the permitted senders.
const (
	PairingRequired = "required" // senders that an admin has confirmed
	PairingOpen     = "open"     // everybody
)

// Definition declares a channel in a workspace file.
type Definition struct {
	Name        string            `yaml:"name" json:"name"`
	Description string            `yaml:"description" json:"description,omitempty"`
	Type        string            `yaml:"type" json:"type"`
	Agent       string            `yaml:"agent" json:"agent,omitempty"`         // default: the default agent
	Secrets     map[string]string `yaml:"secrets" json:"secrets"`               // references, by name
	Settings    map[string]string `yaml:"settings" json:"settings,omitempty"`   // of the type, such as mode of telegram
	Pairing     string            `yaml:"pairing" json:"pairing,omitempty"`     // required or open
	ReportTo    string            `yaml:"report_to" json:"report_to,omitempty"` // the conversation that gets reports, as the type names it
}

var (
	nameForm = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,63}$`)
	envForm  = regexp.MustCompile(`^\$\{[A-Za-z_][A-Za-z0-9_]*\}$`)
)

// Types lists the types of channels.
func Types() []string { return []string{Telegram, Slack, Email} }

// fields are the secrets and settings of a type of channels.
type fields struct {
	secrets  map[string]bool                      // true: required
	settings map[string]func(value string) string // the check of a value; "" for a valid one, else the problem
	required []string                             // settings that must be set
}

// types returns the fields of each type.
func types() map[string]fields {
	return map[string]fields{
		Telegram: {
			secrets: map[string]bool{"token": true, "webhook": false},
			settings: map[string]func(string) string{
				"mode": oneOf("polling", "webhook"), "base_url": webAddress,
			},
		},
		Slack: {
			secrets: map[string]bool{"token": true, "app_token": false, "signing_secret": false},
			settings: map[string]func(string) string{
				"mode": oneOf("socket", "events"), "base_url": webAddress,
			},
		},
		Email: emailFields(),
	}
}

// emailFields returns the secrets and settings that package email reads.
func emailFields() fields {
	text := func(string) string { return "" }
	return fields{
		secrets: map[string]bool{"key": true, "password": false, "webhook": false},
		settings: map[string]func(string) string{
			"address": ownMailbox, "listen": hostPort, "max_bytes": mailBytes, "tls_cert": absolutePath, "tls_key": absolutePath,
			"relays": networks, "authserv_id": text, "webhook_scheme": oneOf("bearer", "hmac", "standard"),
			"smtp": serverAddress, "smtp_tls": oneOf("starttls", "implicit", "none"), "smtp_ca": absolutePath, "username": text,
		},
		required: []string{"address", "smtp"},
	}
}

// ownMailbox checks the address of a channel. Package email appends a + and a signed suffix to the local part, and RFC
// 5321 allows 64 bytes for both.
func ownMailbox(v string) string {
	a, err := mail.ParseAddress(v)
	if err != nil {
		return "must be an address, such as Support <support@example.com>"
	}
	local := a.Address[:strings.LastIndexByte(a.Address, '@')]
	if len(local) > 20 || strings.ContainsAny(local, "+@") {
		return "must have at most 20 bytes before the @, and no +"
	}
	return ""
}

func absolutePath(v string) string {
	if filepath.IsAbs(v) {
		return ""
	}
	return "must be an absolute path"
}

// hostPort checks an address to listen on, whose host may be empty.
func hostPort(v string) string {
	if _, port, err := net.SplitHostPort(v); err != nil || port == "" {
		return "must be host:port"
	}
	return ""
}

func serverAddress(v string) string {
	if strings.HasPrefix(v, ":") {
		return "must be host:port; the host is missing"
	}
	return hostPort(v)
}

func mailBytes(v string) string {
	if n, err := strconv.ParseInt(v, 10, 64); err != nil || n < 10_000 || n > 50<<20 {
		return "must be a number of bytes from 10000 to 52428800"
	}
	return ""
}

func networks(v string) string {
	for field := range strings.FieldsSeq(v) {
		_, notAddress := netip.ParseAddr(field)
		if _, notPrefix := netip.ParsePrefix(field); notAddress != nil && notPrefix != nil {
			return "must be addresses and networks, such as 10.0.0.7 192.168.0.0/16"
		}
	}
	return ""
}

func oneOf(values ...string) func(string) string {
	return func(v string) string {
		if slices.Contains(values, v) {
			return ""
		}
		return "must be " + strings.Join(values, " or ")
	}
}

func webAddress(v string) string {
	if u, err := url.Parse(v); err == nil && u.Host != "" && (u.Scheme == "https" || u.Scheme == "http") {
		return ""
	}
	return "must be an https:// or http:// address"
}

// Validate returns all problems of d, each as "field path: problem", joined as by [errors.Join].
func Validate(d Definition) error {
	var problems fielderr.List
	if !nameForm.MatchString(d.Name) {
		problems.Add("name", "must be 1 to 64 of a-z, 0-9, _ and -, and begin with a letter or digit")
	}
	if d.Pairing != "" && d.Pairing != PairingRequired && d.Pairing != PairingOpen {
		problems.Add("pairing", "must be %s or %s", PairingRequired, PairingOpen)
	}
	if len(d.ReportTo) > maxConversation {
		problems.Add("report_to", "has more than %d bytes", maxConversation)
	}
	kind, known := types()[d.Type]
	if !known { // which fields it has is unknown, too
		problems.Add("type", "must be %s", strings.Join(slices.Sorted(maps.Keys(types())), ", "))
		return errors.Join(problems...)
	}
	for _, name := range slices.Sorted(maps.Keys(kind.secrets)) {
		if kind.secrets[name] && d.Secrets[name] == "" {
			problems.Add("secrets", "needs %s, as ${NAME} or file:/path", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(d.Secrets)) {
		path, isFile := strings.CutPrefix(d.Secrets[name], "file:")
		switch _, has := kind.secrets[name]; {
		case !has:
			problems.Add("secrets", "%q is unknown; a %s channel has %s", name, d.Type,
				strings.Join(slices.Sorted(maps.Keys(kind.secrets)), ", "))
		case !envForm.MatchString(d.Secrets[name]) && (!isFile || !filepath.IsAbs(path)):
			problems.Add("secrets", "%s is no reference; a secret does not belong in a file that is shared: "+
				"write ${NAME} of the environment or file:/absolute/path", name)
		}
	}
	for _, name := range kind.required {
		if _, has := d.Settings[name]; !has {
			problems.Add("settings", "needs %s", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(d.Settings)) {
		check, has := kind.settings[name]
		if !has {
			problems.Add("settings", "%q is unknown; a %s channel has %s", name, d.Type,
				strings.Join(slices.Sorted(maps.Keys(kind.settings)), ", "))
		} else if wrong := check(d.Settings[name]); wrong != "" {
			problems.Add("settings", "%s %s", name, wrong)
		}
	}
	if (d.Settings["tls_cert"] == "") != (d.Settings["tls_key"] == "") {
		problems.Add("settings", "tls_cert and tls_key need each other")
	}
	if d.Type == Telegram && d.Settings["mode"] == "webhook" && d.Secrets["webhook"] == "" {
		problems.Add("secrets", "needs webhook where settings.mode is webhook; it authenticates Telegram")
	}
	if need := slackSecret(d.Settings["mode"]); d.Type == Slack && d.Secrets[need] == "" {
		problems.Add("secrets", "needs %s for the mode %s", need, cmp.Or(d.Settings["mode"], "socket"))
	}
	return errors.Join(problems...)
}

// slackSecret returns the name of the secret that a mode of Slack needs beside the token.
func slackSecret(mode string) string {
	if mode == "events" {
		return "signing_secret"
	}
	return "app_token"
}

// Put stores the declaration d and reports whether it changed anything. State and cursor stay.
func Put(ctx context.Context, db postgres.DB, d Definition) (changed bool, err error) {
	if err := Validate(d); err != nil {
		return false, fmt.Errorf("put channel %q: %w", d.Name, err)
	}
	verb := fmt.Sprintf("put channel %q", d.Name)
	changed, err = postgres.Upsert(ctx, db, verb, "agent_channels", "name", postgres.Strict{
		"name": d.Name, "description": d.Description, "type": d.Type, "agent": d.Agent, "secrets": notNil(d.Secrets),
		"settings": notNil(d.Settings), "pairing": cmp.Or(d.Pairing, PairingRequired), "report_to": d.ReportTo,
		"source": postgres.SourceWorkspace,
	})
	if err == nil && changed {
		err = notify(ctx, db)
	}
	return changed, err
}

func notNil(m map[string]string) map[string]string {
	if m == nil {
		return map[string]string{}
	}
	return m
}

// Remove deletes the workspace's channels except keep, and returns their names. Their messages stay.
func Remove(ctx context.Context, db postgres.DB, keep []string) ([]string, error) {
	names, err := postgres.DeleteOthers(ctx, db, "channels", "agent_channels", keep)
	if err == nil && len(names) > 0 {
		err = notify(ctx, db)
	}
	return names, err
}
