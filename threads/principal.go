package threads

import (
	"crypto/sha256"
	"encoding/hex"
)

// Kind is a kind of principal.
type Kind string

// The kinds of owners. Keys, visitors, flows and webhooks can also get access to a thread.
const (
	ByKey     Kind = "key"     // a chat key, held by a backend
	ByVisitor Kind = "visitor" // a visitor of a browser's chat key, identified by a secret
	ByFlow    Kind = "flow"
	ByWebhook Kind = "webhook" // an endpoint
	ByChannel Kind = "channel" // webhook or log
	ByAdmin   Kind = "admin"
)

// Principal owns threads or has access to them. Names of threads are scoped by principal.
type Principal struct {
	Kind  Kind   `json:"kind"`
	Owner string `json:"owner"` // name of the key, flow, endpoint or channel; admin
	Proof string `json:"-"`     // of a visitor: the digest of its secret, see [Visitor]
}

// Admin is the principal of all admins.
var Admin = Principal{Kind: ByAdmin, Owner: "admin"}

// Key returns the principal of a chat key.
func Key(name string) Principal { return Principal{Kind: ByKey, Owner: name} }

// Visitor returns the principal of a visitor under a chat key, identified by a secret.
func Visitor(key, secret string) Principal {
	sum := sha256.Sum256([]byte(secret))
	return Principal{Kind: ByVisitor, Owner: key, Proof: hex.EncodeToString(sum[:])}
}
