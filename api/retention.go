package api

import (
	"errors"

	"github.com/lanekeeper/lanekeeper/retention"
)

// retaining is how long what is over is kept.
func (s *server) retaining() []route {
	return []route{
		{
			method: "GET", path: "/v1/retention", answer: policies{}, handle: s.getRetention,
			about: "How long each kind of rows is kept after it is over, and how many have gone. What is not finished is never touched.",
		}, {
			method: "PUT", path: "/v1/retention", body: keep{}, answer: retention.Change{}, handle: s.setRetention,
			about: "Change how long kinds of rows are kept: a span of time such as 90d, or forever. Kinds that are not named stay as they are. " +
				"All are changed or, with 400, none; changed is false when it was so already.",
		},
	}
}

// policies is what GET answers.
type policies struct {
	Items []retention.Policy `json:"items"`
}

// keep is the body of PUT.
type keep struct {
	because
	Keep map[string]string `json:"keep"`
}

func (b keep) check() error {
	if len(b.Keep) == 0 {
		return badBody(`keep is missing: give kinds and times, such as {"activity": "90d"}`)
	}
	for name, time := range b.Keep {
		if !storable(name) || !storable(time) {
			return badBody("keep has control characters at %.60q", name)
		}
	}
	return b.because.check()
}

func (s *server) getRetention(r request) (answer, error) {
	list, err := retention.Show(r.Context(), s.pool)
	return answer{body: policies{list}}, err
}

func (s *server) setRetention(r request) (answer, error) {
	b := r.body.(keep)
	got, err := retention.Set(r.Context(), s.pool, b.Keep, admin, b.Reason)
	if errors.Is(err, retention.ErrInvalid) {
		return answer{}, badBody("%s", err)
	}
	return answer{body: got, trace: got.TraceID}, err
}
