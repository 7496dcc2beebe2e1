package config

import (
	"encoding/json"
	"log/slog"
)

// Secret prints, logs and marshals as ***, except as a map key, which encoding/json writes unmasked.
type Secret string

const mask = "***"

// Reveal returns the secret text.
func (s Secret) Reveal() string { return string(s) }

// IsSet reports whether the secret is not empty.
func (s Secret) IsSet() bool { return s != "" }

// String masks the secret; empty stays empty.
func (s Secret) String() string {
	if s == "" {
		return ""
	}
	return mask
}

// GoString masks the secret in %#v.
func (s Secret) GoString() string { return `"` + s.String() + `"` }

// LogValue masks the secret in logs.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// MarshalJSON masks the secret.
func (s Secret) MarshalJSON() ([]byte, error) { return json.Marshal(s.String()) }

// MarshalText masks the secret.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }
