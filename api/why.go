package api

import "github.com/lanekeeper/lanekeeper/why"

// explaining is the route that says why.
func (s *server) explaining() []route {
	return []route{{
		method: "GET", path: "/v1/traces/{id}/why", answer: why.Answer{}, handle: s.getWhy, replica: true,
		about: "Why a trace is what it is, in rows that are read from top to bottom: what caused it across traces, what it did, waited for and held, " +
			"what went wrong, what came of it, what it cost. from_ref caused to_ref. The id may have any form; the same in SQL is why(trace).",
	}}
}

func (s *server) getWhy(r request) (answer, error) {
	a, err := why.Of(r.Context(), s.read, r.PathValue("id"))
	if err != nil {
		return answer{}, err
	}
	return answer{body: a, trace: a.TraceID}, nil
}
