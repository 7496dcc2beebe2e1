package webhook

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/credentials"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/signature"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// Expect rejects a request by its header: unknown endpoint, or missing credentials. Otherwise it returns the request
// and its body limit. The error is a *credentials.Wait for an address with many wrong bearer tokens.
func (s *Surface) Expect(r *http.Request) (*http.Request, int64, error) {
	e, err := s.expect(r)
	if err != nil {
		return nil, 0, err
	}
	return r.WithContext(context.WithValue(r.Context(), expectedKey{}, e)), e.endpoint.Settings.MaxBytes, nil
}

// Busy counts and logs a request that was rejected because too many are under way. It ignores names that no endpoint
// had in a request to this process, because strangers choose them.
func (s *Surface) Busy(r *http.Request) {
	name := r.PathValue("endpoint")
	if _, served := s.served.Load(name); served {
		s.report(name, "busy")
		s.logRejection(r.Context(), name, "busy", admission.ErrFull)
	}
}

// expected has the endpoint and the verifier of a request. [Surface.Expect] finds them before the body is read.
type expected struct {
	endpoint webhooks.Endpoint
	verifier signature.Verifier
	missing  error // a secret that is not set; nil if all are
}

// cause returns why a request is rejected: a missing secret may have signed what the others have not.
func (e expected) cause(err error) error {
	if e.missing != nil && errors.Is(err, signature.ErrRefused) {
		return e.missing
	}
	return err
}

type expectedKey struct{}

// expect finds the endpoint of a request and checks everything that the headers alone can prove, before the body is
// read. Later calls for the same request return the first result.
func (s *Surface) expect(r *http.Request) (expected, error) {
	if cached, ok := r.Context().Value(expectedKey{}).(expected); ok {
		return cached, nil
	}
	e, err := webhooks.GetEndpoint(r.Context(), s.requestPool(), r.PathValue("endpoint"))
	if errors.Is(err, webhooks.ErrNotFound) || err == nil && !e.Enabled {
		return expected{}, problem.New(http.StatusNotFound, "no such endpoint")
	}
	if err != nil {
		return expected{}, err
	}
	s.served.Store(e.Name, true)
	// Check the headers before the secrets: a request without a signature gets 401, even if a secret is missing.
	if err := e.Verifier(nil).Before(r.Header, s.now()); err != nil {
		return expected{}, s.rejectionError(r.Context(), e.Name, err)
	}
	secrets, missing := webhooks.Secrets(e.Secrets, s.Getenv)
	if missing != nil && len(secrets) == 0 {
		return expected{}, s.rejectionError(r.Context(), e.Name, missing)
	}
	known := expected{e, e.Verifier(secrets), missing}
	if e.Scheme == signature.Bearer {
		err = s.checkBearer(r, e, secrets)
	} else {
		err = known.verifier.Before(r.Header, s.now())
	}
	if wait, is := errors.AsType[*credentials.Wait](err); is {
		s.report(e.Name, "refused")
		return expected{}, wait
	}
	if err != nil {
		return expected{}, s.rejectionError(r.Context(), e.Name, known.cause(err))
	}
	return known, nil
}

// checkBearer checks a bearer token through the guard. After many wrong tokens the error is a *credentials.Wait.
func (s *Surface) checkBearer(r *http.Request, e webhooks.Endpoint, secrets []string) error {
	if err := webhooks.CheckTokens(e.Scheme, e.Secrets, s.Getenv); err != nil {
		return err
	}
	token, err := signature.Token(r.Header)
	if err != nil {
		return err
	}
	keys := make([]credentials.Key, len(secrets))
	for i, secret := range secrets {
		keys[i] = credentials.NewKey("", secret)
	}
	s.guardOnce.Do(func() { s.guard = credentials.NewGuard(s.Logger) })
	_, valid, err := s.guard.Check(r, credentials.Hook, token, keys...)
	if err == nil && !valid {
		err = fmt.Errorf("%w: the token does not belong to this endpoint", signature.ErrRefused)
	}
	return err
}

// rejectionError maps a failed verification to a problem. A setup error, such as a missing secret, is a 500, so that
// the sender retries.
func (s *Surface) rejectionError(ctx context.Context, endpoint string, err error) error {
	if !errors.Is(err, signature.ErrRefused) {
		s.logRejection(ctx, endpoint, "setup", err)
		return problem.New(http.StatusInternalServerError, "this endpoint cannot verify requests; see the server log")
	}
	s.report(endpoint, "refused")
	s.logRejection(ctx, endpoint, "signature", err)
	return problem.New(http.StatusUnauthorized, "%s", err).Kind("bad-signature", "Bad signature")
}

// logRejection logs unverified requests at a limited rate, so that senders cannot fill the log. class is signature for
// an error of the sender, setup for an error of the installation, and busy for too many requests.
func (s *Surface) logRejection(ctx context.Context, endpoint, class string, cause error) {
	s.mu.Lock()
	if s.rejections == nil {
		s.rejections = map[string]rejectionCount{}
	}
	rejections := s.rejections[class+" "+endpoint]
	rejections.count++
	shouldLog := time.Since(rejections.loggedAt) >= rejectionLogInterval
	count := rejections.count
	if shouldLog {
		rejections = rejectionCount{loggedAt: time.Now()}
	}
	s.rejections[class+" "+endpoint] = rejections
	s.mu.Unlock()
	if !shouldLog {
		return
	}
	ctx = trace.With(ctx, trace.Span{TraceID: trace.New(trace.Webhook), Surface: trace.Webhook, Agent: s.Agent})
	level := slog.LevelWarn
	if class == "setup" {
		level = slog.LevelError
	}
	s.Logger.Log(ctx, level, "webhook refused", "endpoint", endpoint, "reason", cause, "count", count)
	_, err := activity.Note(ctx, s.requestPool(), activity.Entry{
		Skill: "webhook_refused", Input: map[string]any{"endpoint": endpoint, "count": count},
	}, activity.Outcome{Status: activity.Error, Class: class, Message: cause.Error()})
	if err != nil {
		s.Logger.WarnContext(ctx, "rejected webhook not recorded", "error", err)
	}
}

// rejectionCount counts an endpoint's unverified requests since the last log line.
type rejectionCount struct {
	loggedAt time.Time
	count    int
}

const rejectionLogInterval = time.Minute
