package api

import (
	"fmt"
	"net/http"
	"path"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/credentials"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// newMux returns a mux for the table. Unknown paths get 404, wrong methods 405 with Allow.
func (s *server) newMux(table []route) (http.Handler, error) {
	document := route{
		method: http.MethodGet, path: "/openapi.json", access: Public, response: map[string]any{},
		about: "This document: all routes with their input and output.",
	}
	table = append(slices.Clip(table), document)
	described, err := s.openAPI(table)
	if err != nil {
		return nil, err
	}
	table[len(table)-1].httpHandler = described
	mux := http.NewServeMux()
	paths := map[string][]route{}
	for _, rt := range table {
		if err := register(mux, rt.method+" "+rt.path, s.serve(rt)); err != nil {
			return nil, err
		}
		paths[rt.path] = append(paths[rt.path], rt)
	}
	for path, rows := range paths {
		if err := s.registerMethodNotAllowed(mux, path, rows); err != nil {
			return nil, err
		}
	}
	unknown := map[string]http.Handler{"/v1": s.unknownV1Route(), "/v1/": s.unknownV1Route()}
	if _, taken := paths["/"]; !taken {
		unknown["/"] = s.authenticateAndAdmit(route{access: Public}, s.unknownRoute())
	}
	for pattern, handler := range unknown {
		mux.Handle(pattern, handler)
	}
	return s.proxies.Handler(s.withMiddleware(withoutHTML(mux, unknown)), s.log), nil
}

// withoutHTML answers paths that http.ServeMux would clean, such as /v1//x. If the clean path is a route, it sends a
// redirect without an HTML page. Otherwise it answers like the pattern of unknown routes.
func withoutHTML(mux *http.ServeMux, unknown map[string]http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		given := r.URL.EscapedPath()
		if clean := path.Clean(given); given != clean && given != clean+"/" {
			_, pattern := mux.Handler(r)
			if handler, ok := unknown[pattern]; ok {
				handler.ServeHTTP(w, r)
				return
			}
			w.Header()["Content-Type"] = nil // http.Redirect writes a page only without a Content-Type
		}
		mux.ServeHTTP(w, r)
	})
}

// register is mux.Handle, which panics on an invalid pattern.
func register(mux *http.ServeMux, pattern string, h http.Handler) (err error) {
	defer func() {
		if value := recover(); value != nil {
			err = fmt.Errorf("route %s: %v", pattern, value)
		}
	}()
	mux.Handle(pattern, h)
	return nil
}

// registerMethodNotAllowed handles the missing methods of a path. http.ServeMux rejects a pattern for all methods if
// the path overlaps another path, such as /a/new and /a/{id}. Then registerMethodNotAllowed registers each missing
// method alone.
func (s *server) registerMethodNotAllowed(mux *http.ServeMux, path string, rows []route) error {
	notAllowed := s.methodNotAllowed(rows)
	if register(mux, path, notAllowed) == nil {
		return nil
	}
	for _, method := range []string{"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} {
		if slices.ContainsFunc(rows, func(rt route) bool { return rt.method == method }) {
			continue
		}
		if err := register(mux, method+" "+path, notAllowed); err != nil {
			return err
		}
	}
	return nil
}

// methodNotAllowed requires the strictest access of the path's rows.
func (s *server) methodNotAllowed(rows []route) http.Handler {
	guarded := rows[0]
	var methods []string
	for _, rt := range rows {
		methods = append(methods, rt.method)
		if rt.method == http.MethodGet {
			methods = append(methods, http.MethodHead)
		}
		if rt.access > guarded.access {
			guarded = rt
		}
	}
	allow := strings.Join(methods, ", ")
	closed := route{
		access: guarded.access, scopes: authenticated, openAI: guarded.openAI, page: guarded.page, crossOrigin: true,
	}
	return s.authenticateAndAdmit(closed, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Allow", allow)
		s.writeError(w, r, closed, problem.New(http.StatusMethodNotAllowed, "method %.20s is not allowed; use %s",
			r.Method, allow), "")
	}))
}

// unknownV1Route returns 404 to admins and chat keys, because OpenAI clients try routes that this server lacks.
func (s *server) unknownV1Route() http.Handler {
	visitor := route{openAI: true}
	toAdmin := s.authenticateAndAdmit(route{access: Admin, scopes: authenticated, crossOrigin: true},
		s.errorHandler(route{}, routeNotFound))
	toVisitor := s.errorHandler(visitor, routeNotFound)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		key, has := bearer(r)
		if has && s.auth.guard.Knows(r, credentials.Admin, key, s.auth.chat...) {
			toVisitor.ServeHTTP(w, r)
			return
		}
		toAdmin.ServeHTTP(w, r)
	})
}

// unknownRoute returns 404 as a page or as a problem.
func (s *server) unknownRoute() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if wantsPage(r) && s.pages != nil {
			s.pages.Refuse(w, r, problem.New(http.StatusNotFound, "no page %.200s", r.URL.Path))
			return
		}
		s.writeError(w, r, route{}, routeNotFound(r), "")
	})
}

// errorHandler writes the same error for every request, in the format of rt.
func (s *server) errorHandler(rt route, why func(r *http.Request) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.writeError(w, r, rt, why(r), "") })
}

func routeNotFound(r *http.Request) error {
	return problem.New(http.StatusNotFound, "no route %.200s; see /openapi.json", r.URL.Path)
}
