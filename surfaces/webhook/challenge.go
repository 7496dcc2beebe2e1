package webhook

import (
	"errors"
	"io"
	"net/http"
	"strconv"

	"github.com/lanekeeper/lanekeeper/internal/credentials"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// maxChallenge bounds an echoed challenge in bytes.
const maxChallenge = 1024

// slackChallenge returns the challenge of a verified body. The surface answers such a body and does not store it.
func slackChallenge(e webhooks.Endpoint, value any) (string, bool) {
	body, _ := value.(map[string]any)
	text, is := body["challenge"].(string)
	return text, is && e.Settings.Challenge == webhooks.ChallengeSlack && body["type"] == "url_verification" &&
		len(text) <= maxChallenge
}

// Challenge serves GET /webhooks/{endpoint}: it echoes hub.challenge to a caller with the endpoint's verify token. The
// guard throttles wrong tokens.
func (s *Surface) Challenge() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text, err := s.metaChallenge(r)
		if wait, is := errors.AsType[*credentials.Wait](err); is {
			w.Header().Set("Retry-After", strconv.Itoa(wait.Seconds()))
			err = problem.New(http.StatusTooManyRequests, "%v", wait).Kind("too-many-wrong-tries", "Too many wrong tries")
		}
		if err != nil {
			problem.Write(w, r, err, "", s.Logger)
			return
		}
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cache-Control", "no-store")
		if _, err := io.WriteString(w, text); err != nil {
			s.Logger.DebugContext(r.Context(), "response not written", "error", err)
		}
	})
}

// metaChallenge returns hub.challenge of a request with the endpoint's verify token. Wrong tokens count as failed
// logins of their address.
func (s *Surface) metaChallenge(r *http.Request) (string, error) {
	e, err := webhooks.GetEndpoint(r.Context(), s.requestPool(), r.PathValue("endpoint"))
	switch {
	case errors.Is(err, webhooks.ErrNotFound),
		err == nil && (!e.Enabled || e.Settings.Challenge != webhooks.ChallengeMeta):
		return "", problem.New(http.StatusNotFound, "no such endpoint, or none that answers challenges")
	case err != nil:
		return "", err
	}
	query := r.URL.Query()
	text := query.Get("hub.challenge")
	if query.Get("hub.mode") != "subscribe" || text == "" || len(text) > maxChallenge {
		return "", problem.New(http.StatusBadRequest,
			"a challenge has hub.mode=subscribe, hub.verify_token, and hub.challenge of at most %d bytes", maxChallenge)
	}
	tokens, err := webhooks.Secrets([]string{e.Settings.VerifyToken}, s.Getenv)
	if err != nil {
		return "", s.rejectionError(r.Context(), e.Name, err)
	}
	s.guardOnce.Do(func() { s.guard = credentials.NewGuard(s.Logger) })
	_, valid, err := s.guard.Check(r, credentials.Hook, query.Get("hub.verify_token"), credentials.NewKey("", tokens[0]))
	if err == nil && !valid {
		s.report(e.Name, "refused")
		err = problem.New(http.StatusForbidden, "the verify token is not that of this endpoint")
	}
	return text, err
}
