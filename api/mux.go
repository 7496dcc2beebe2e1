package api

import (
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/credentials"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// handler routes by the table. What the table does not have is a problem too: 404, or 405 with Allow.
func (s *server) handler(table []route) (http.Handler, error) {
	document := route{
		method: http.MethodGet, path: "/openapi.json", access: Public, answer: map[string]any{},
		about: "This document: every route, what it takes and what it answers.",
	}
	table = append(slices.Clip(table), document)
	described, err := s.openAPI(table)
	if err != nil {
		return nil, err
	}
	table[len(table)-1].handler = described
	mux := http.NewServeMux()
	paths := map[string][]route{}
	for _, rt := range table {
		if err := register(mux, rt.method+" "+rt.path, s.serve(rt)); err != nil {
			return nil, err
		}
		paths[rt.path] = append(paths[rt.path], rt)
	}
	for path, rows := range paths {
		if err := s.refuseMethods(mux, path, rows); err != nil {
			return nil, err
		}
	}
	mux.Handle("/v1/", s.noRouteInV1())
	if _, taken := paths["/"]; !taken {
		mux.Handle("/", s.enter(route{access: Public}, s.noRouteAtAll()))
	}
	return s.proxies.Handler(s.wrap(mux), s.log), nil
}

// register is mux.Handle, which panics at a pattern that it cannot take.
func register(mux *http.ServeMux, pattern string, h http.Handler) (err error) {
	defer func() {
		if value := recover(); value != nil {
			err = fmt.Errorf("route %s: %v", pattern, value)
		}
	}()
	mux.Handle(pattern, h)
	return nil
}

// refusing answers every request with an error, as rt does.
func (s *server) refusing(rt route, why func(r *http.Request) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.refuse(w, r, rt, why(r), "") })
}

// refuseMethods answers for the methods that a path does not have. A path that is a case of another one's, as /a/new is
// of /a/{id}, cannot be taken for all methods: http.ServeMux sees no order between it and GET /a/{id}. Then those
// methods are refused that there are.
func (s *server) refuseMethods(mux *http.ServeMux, path string, rows []route) error {
	refusal := s.wrongMethod(rows)
	if register(mux, path, refusal) == nil {
		return nil
	}
	for _, method := range []string{"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} {
		if slices.ContainsFunc(rows, func(rt route) bool { return rt.method == method }) {
			continue
		}
		if err := register(mux, method+" "+path, refusal); err != nil {
			return err
		}
	}
	return nil
}

// wrongMethod answers for a path that exists, to whom may call the most guarded of its rows.
func (s *server) wrongMethod(rows []route) http.Handler {
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
	closed := route{access: guarded.access, openAI: guarded.openAI, page: guarded.page, foreign: true}
	return s.enter(closed, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Allow", allow)
		s.refuse(w, r, closed, problem.New(http.StatusMethodNotAllowed, "%.20s is not possible here; use %s", r.Method, allow), "")
	}))
}

// noRouteInV1 tells the admin, and whoever has a chat key: stock clients try what OpenAI has and we have not.
func (s *server) noRouteInV1() http.Handler {
	visitor := route{openAI: true}
	toAdmin := s.enter(route{access: Admin, foreign: true}, s.refusing(route{}, noRoute))
	toVisitor := s.refusing(visitor, noRoute)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		key, has := bearer(r)
		if has && s.gate.guard.Knows(r, credentials.Admin, key, s.gate.chat...) {
			toVisitor.ServeHTTP(w, r)
			return
		}
		toAdmin.ServeHTTP(w, r)
	})
}

// noRouteAtAll tells a person with a page, and a program with a problem.
func (s *server) noRouteAtAll() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if wantsPage(r) && s.pages != nil {
			s.pages.Refuse(w, r, problem.New(http.StatusNotFound, "there is no page %.200s", r.URL.Path))
			return
		}
		s.refuse(w, r, route{}, noRoute(r), "")
	})
}

func noRoute(r *http.Request) error {
	return problem.New(http.StatusNotFound, "there is no route %.200s; /openapi.json lists them", r.URL.Path)
}
