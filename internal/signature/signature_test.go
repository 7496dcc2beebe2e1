package signature_test

import (
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
	stripe "github.com/stripe/stripe-go/v85/webhook"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/signature"
)

const (
	whsec = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
	other = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
)

var (
	body = []byte(`{"type":"invoice.paid","data":{"id":"in_1","text":"déjà {timestamp}"}}`)
	now  = time.Unix(1_700_000_000, 0)
)

func header(pairs ...string) http.Header {
	h := http.Header{}
	for i := 0; i < len(pairs); i += 2 {
		h.Set(pairs[i], pairs[i+1])
	}
	return h
}

// officialHeaders signs with the official library.
func officialHeaders(t *testing.T, secret, id string, at time.Time, payload []byte) http.Header {
	t.Helper()
	wh, err := standardwebhooks.NewWebhook(secret)
	require.NoError(t, err)
	signed, err := wh.Sign(id, at, payload)
	require.NoError(t, err)
	return header("webhook-id", id, "webhook-timestamp", fmt.Sprint(at.Unix()), "webhook-signature", signed)
}

// svixHeaders renames the headers like Svix.
func svixHeaders(h http.Header) http.Header {
	return header("svix-id", h.Get("webhook-id"), "svix-timestamp", h.Get("webhook-timestamp"),
		"svix-signature", h.Get("webhook-signature"))
}

func hexSum(secret, message string) string {
	mac := hmac.New(sha256.New, []byte(secret))
	mac.Write([]byte(message))
	return hex.EncodeToString(mac.Sum(nil))
}

func TestSignaturesOfOfficialLibraryVerify(t *testing.T) {
	t.Parallel()
	stripeHeader := stripe.GenerateTestSignedPayload(&stripe.UnsignedPayload{
		Payload: body, Secret: "whsec_stripe",
		Timestamp: now,
	}).Header
	for name, c := range map[string]struct {
		v signature.Verifier
		h http.Header
		b []byte
	}{
		"Standard Webhooks": {
			signature.Verifier{Scheme: signature.Standard, Secrets: []string{whsec}},
			officialHeaders(t, whsec, "msg_1", now, body),
			body,
		},
		"Stripe": {
			signature.Verifier{Scheme: signature.Stripe, Secrets: []string{"whsec_stripe"}},
			header("Stripe-Signature", stripeHeader), body,
		},
		"GitHub's published example": {
			signature.Verifier{Scheme: signature.GitHub, Secrets: []string{"It's a Secret to Everybody"}},
			header("X-Hub-Signature-256", "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"),
			[]byte("Hello, World!"),
		},
		"the specification's own example": {
			signature.Verifier{Scheme: signature.Standard, Secrets: []string{whsec}, Tolerance: 100 * 365 * 24 * time.Hour},
			header("webhook-id", "msg_p5jXN8AQM9LWM0D4loKWxJek", "webhook-timestamp", "1614265330",
				"webhook-signature", "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="),
			[]byte(`{"test": 2432232314}`),
		},
		"generic in hex": {
			signature.Verifier{Scheme: signature.HMAC, Secrets: []string{"s"}},
			header("X-Signature", hexSum("s", string(body))),
			body,
		},
		"generic as Slack signs": {
			signature.Verifier{Scheme: signature.HMAC, Secrets: []string{"s"}, Layout: signature.Layout{
				Header: "X-Slack-Signature", Prefix: "v0=", TimestampHeader: "X-Slack-Request-Timestamp",
				Signed: "v0:{timestamp}:{body}",
			}},
			header("X-Slack-Request-Timestamp", "1700000000", "X-Slack-Signature",
				"v0="+hexSum("s", "v0:1700000000:"+string(body))), body,
		},
		"generic with an id": {
			signature.Verifier{Scheme: signature.HMAC, Secrets: []string{"s"}, Layout: signature.Layout{
				Header: "X-Sign", TimestampHeader: "X-Time", IDHeader: "X-Id",
			}},
			header("X-Id", "{body}", "X-Time", "1700000000", "X-Sign", hexSum("s", "{body}.1700000000."+string(body))), body,
		},
		"generic with an id and no time": {
			signature.Verifier{Scheme: signature.HMAC, Secrets: []string{"s"}, Layout: signature.Layout{
				Header: "X-Sign", IDHeader: "X-Id", Signed: "{id}:{body}",
			}},
			header("X-Id", "7", "X-Sign", hexSum("s", "7:"+string(body))), body,
		},
		"Svix": {
			signature.Verifier{Scheme: signature.Standard, Secrets: []string{whsec}},
			svixHeaders(officialHeaders(t, whsec, "msg_1", now, body)), body,
		},
		"generic in base64": {
			signature.Verifier{
				Scheme: signature.HMAC, Secrets: []string{"s"},
				Layout: signature.Layout{Header: "X-Shop", Encoding: "base64"},
			},
			header("X-Shop", func() string {
				raw, _ := hex.DecodeString(hexSum("s", string(body)))
				return base64.StdEncoding.EncodeToString(raw)
			}()), body,
		},
		"bearer": {
			signature.Verifier{Scheme: signature.Bearer, Secrets: []string{"tok"}},
			header("Authorization", "bearer tok"), body,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			assert.NoError(t, c.v.Verify(c.h, c.b, now))
			if c.v.Scheme != signature.Bearer {
				assert.ErrorIs(t, c.v.Verify(c.h, append([]byte(" "), c.b...), now), signature.ErrRefused)
			}
			wrong := c.v
			wrong.Secrets = []string{other}
			assert.ErrorIs(t, wrong.Verify(c.h, c.b, now), signature.ErrRefused)
			rotated := c.v
			rotated.Secrets = []string{other, c.v.Secrets[0]}
			assert.NoError(t, rotated.Verify(c.h, c.b, now), "the old secret beside a new one")
			assert.ErrorIs(t, c.v.Verify(http.Header{}, c.b, now), signature.ErrRefused)
		})
	}
}

func TestOfficialLibraryVerifiesOurSignatures(t *testing.T) {
	t.Parallel()
	wh, err := standardwebhooks.NewWebhook(whsec)
	require.NoError(t, err)
	h, err := signature.Sign([]string{other, whsec}, "msg_2", time.Now(), body)
	require.NoError(t, err)
	assert.NoError(t, wh.Verify(body, h))
	_, err = signature.Sign([]string{whsec}, "msg.2", now, body)
	assert.Error(t, err, "an id with a dot was signed")
	_, err = signature.Sign([]string{"whsec_???"}, "msg_2", now, body)
	assert.ErrorIs(t, err, signature.ErrSecret, "a secret that is no base64")
	_, err = signature.Sign(nil, "msg_2", now, body)
	assert.ErrorIs(t, err, signature.ErrSecret, "no secret")
}

func TestAsymmetricSignatures(t *testing.T) {
	t.Parallel()
	public, private, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	sk, pk := "whsk_"+base64.StdEncoding.EncodeToString(private), "whpk_"+base64.StdEncoding.EncodeToString(public)
	h, err := signature.Sign([]string{sk}, "msg_3", now, body)
	require.NoError(t, err)
	v := signature.Verifier{Scheme: signature.Standard, Secrets: []string{whsec, pk}}
	assert.NoError(t, v.Verify(h, body, now))
	assert.ErrorIs(t, v.Verify(h, body[1:], now), signature.ErrRefused)
	for name, secret := range map[string]string{"a signing key": sk, "a short key": "whpk_AAAA", "nothing": "whpk_"} {
		v.Secrets = []string{secret}
		assert.ErrorIs(t, v.Verify(h, body, now), signature.ErrSecret, name, "verifies")
	}
	// A v1a signature whose bytes are an HMAC under the public key must not pass as v1.
	forged := header("webhook-id", "msg_3", "webhook-timestamp", "1700000000", "webhook-signature",
		"v1,"+base64.StdEncoding.EncodeToString(func() []byte {
			mac := hmac.New(sha256.New, public)
			fmt.Fprintf(mac, "msg_3.1700000000.%s", body)
			return mac.Sum(nil)
		}()))
	v.Secrets = []string{pk}
	assert.ErrorIs(t, v.Verify(forged, body, now), signature.ErrRefused)
}

func TestTimesOutsideToleranceAreRejected(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		off       time.Duration
		tolerance time.Duration
		good      bool
	}{
		"now":                       {0, 0, true},
		"5 minutes ago":             {-5 * time.Minute, 0, true},
		"more than 5 minutes ago":   {-5*time.Minute - time.Second, 0, false},
		"in 5 minutes":              {5 * time.Minute, 0, true},
		"in more than 5 minutes":    {5*time.Minute + time.Second, 0, false},
		"within a smaller setting":  {-10 * time.Second, 10 * time.Second, true},
		"beyond a smaller setting":  {-11 * time.Second, 10 * time.Second, false},
		"far before the unix epoch": {-100 * 365 * 24 * time.Hour, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			at := now.Add(c.off)
			for scheme, h := range map[signature.Scheme]http.Header{
				signature.Standard: officialHeaders(t, whsec, "msg", at, body),
				signature.Stripe: header("Stripe-Signature", stripe.GenerateTestSignedPayload(
					&stripe.UnsignedPayload{Payload: body, Secret: whsec, Timestamp: at}).Header),
				signature.HMAC: header("X-Time", fmt.Sprint(at.Unix()), "X-Signature",
					hexSum(whsec, fmt.Sprintf("%d.%s", at.Unix(), body))),
			} {
				v := signature.Verifier{
					Scheme: scheme, Secrets: []string{whsec}, Tolerance: c.tolerance,
					Layout: signature.Layout{TimestampHeader: "X-Time"},
				}
				if err := v.Verify(h, body, now); (err == nil) != c.good || err != nil && !errors.Is(err, signature.ErrRefused) {
					t.Errorf("%s: %v", scheme, err)
				}
			}
		})
	}
}

func TestMalformedHeadersAreRejected(t *testing.T) {
	t.Parallel()
	good := officialHeaders(t, whsec, "msg", now, body)
	for name, c := range map[string]struct {
		scheme signature.Scheme
		h      http.Header
	}{
		"no id": {
			signature.Standard,
			header("webhook-timestamp", "1700000000", "webhook-signature", good.Get("webhook-signature")),
		},
		"another id": {
			signature.Standard,
			header("webhook-id", "msg2", "webhook-timestamp", "1700000000", "webhook-signature", good.Get("webhook-signature")),
		},
		"an id of the other prefix": {
			signature.Standard,
			header("webhook-id", "msg2", "svix-id", "msg", "svix-timestamp", "1700000000",
				"svix-signature", good.Get("webhook-signature")),
		},
		"another version": {
			signature.Standard,
			header("webhook-id", "msg", "webhook-timestamp", "1700000000", "webhook-signature",
				strings.Replace(good.Get("webhook-signature"), "v1,", "v2,", 1)),
		},
		"a time with a sign": {
			signature.Standard,
			header("webhook-id", "msg", "webhook-timestamp", "1.7e9", "webhook-signature", good.Get("webhook-signature")),
		},
		"a thousand signatures": {
			signature.Standard,
			header("webhook-id", "msg", "webhook-timestamp", "1700000000", "webhook-signature",
				strings.Repeat("v1,AAAA ", 1000)+good.Get("webhook-signature")),
		},
		"Stripe without v1": {signature.Stripe, header("Stripe-Signature", "t=1700000000,v0=00")},
		"Stripe without t":  {signature.Stripe, header("Stripe-Signature", "v1=00")},
		"sha1 of GitHub":    {signature.GitHub, header("X-Hub-Signature", "sha1=00")},
		"no hex":            {signature.GitHub, header("X-Hub-Signature-256", "sha256=zz")},
		"empty signature":   {signature.GitHub, header("X-Hub-Signature-256", "sha256=")},
		"basic":             {signature.Bearer, header("Authorization", "Basic "+whsec)},
		"empty token":       {signature.Bearer, header("Authorization", "Bearer ")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v := signature.Verifier{Scheme: c.scheme, Secrets: []string{whsec}}
			assert.ErrorIs(t, v.Verify(c.h, body, now), signature.ErrRefused)
		})
	}
}

func TestEmptySecretMatchesNothing(t *testing.T) {
	t.Parallel()
	for _, scheme := range append(signature.Schemes(), "none") {
		for _, secrets := range [][]string{nil, {""}, {whsec, ""}} {
			v := signature.Verifier{Scheme: scheme, Secrets: secrets}
			h := header("X-Signature", hexSum("", string(body)), "X-Hub-Signature-256", "sha256="+hexSum("", string(body)),
				"Authorization", "Bearer ")
			assert.ErrorIs(t, v.Verify(h, body, now), signature.ErrSecret, scheme, "with", secrets)
		}
	}
}

// FuzzVerify searches for panics, and for requests that verify without the secret.
func FuzzVerify(f *testing.F) {
	f.Add("msg", "1700000000", "v1,AAAA v1a,BBBB", body)
	f.Add("", "t=1700000000,v1=00", "sha256=00", []byte{0xff})
	f.Add("x", "9223372036854775807", "Bearer x", []byte(nil))
	public, _, err := ed25519.GenerateKey(nil)
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, a, b, c string, payload []byte) {
		h := http.Header{}
		for i, name := range []string{
			"Webhook-Id", "Webhook-Timestamp", "Webhook-Signature", "Stripe-Signature", "X-Hub-Signature-256", "X-Signature",
			"Authorization", "X-Time", "Svix-Id", "Svix-Timestamp", "Svix-Signature", "X-Id",
		} {
			h.Set(name, []string{a, b, c, b, c, c, c, b, a, b, c, a}[i])
		}
		secrets := []string{whsec, "whpk_" + base64.StdEncoding.EncodeToString(public)}
		for _, scheme := range signature.Schemes() {
			v := signature.Verifier{Scheme: scheme, Secrets: secrets, Layout: signature.Layout{
				TimestampHeader: "X-Time", IDHeader: "X-Id",
			}}
			assert.Error(t, v.Verify(h, payload, now), scheme, "verifies", a, b, c)
		}
	})
}
