package api

import (
	"fmt"
	"net/http"

	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// openAPI serves the document that describes the table.
func (s *server) openAPI(table []route) (http.Handler, error) {
	encoded, err := encode(document(table))
	if err != nil {
		return nil, fmt.Errorf("describe API: %w", err)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "public, max-age=300")
		if _, err := w.Write(encoded); err != nil {
			s.log.DebugContext(r.Context(), "client went away", "path", problem.Path(r), "error", err)
		}
	}), nil
}
