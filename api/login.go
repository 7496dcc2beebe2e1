package api

import (
	"errors"
	"fmt"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/credentials"
	"github.com/lanekeeper/lanekeeper/internal/local"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// Pages answer people, who come with a browser, where programs are answered with problems.
type Pages interface {
	// LogIn answers with the page that asks for the admin token. next is where to go then, a path of this server;
	// wrong says what was wrong with what was given, empty when nothing was.
	LogIn(w http.ResponseWriter, r *http.Request, status int, next, wrong string)
	// Refuse answers with an error.
	Refuse(w http.ResponseWriter, r *http.Request, err error)
}

// maxForm is how many bytes the form of the login has at most.
const maxForm = 16 << 10

// loginPath is the page with the form, and where it is sent to.
const loginPath = "/login"

// loggingIn is how a browser gets its cookie, and gives it back. The page with the form is an endpoint.
func (s *server) loggingIn() []route {
	if s.pages == nil {
		return nil
	}
	return []route{
		{method: "POST", path: loginPath, access: Public, page: true, maxBody: maxForm, handler: http.HandlerFunc(s.logIn), about: "Log in, with the form of GET /login."},
		{method: "POST", path: "/logout", access: Public, page: true, maxBody: maxForm, handler: http.HandlerFunc(s.logOut), about: "End the login."},
	}
}

// logIn gives a cookie for the token.
func (s *server) logIn(w http.ResponseWriter, r *http.Request) {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err == nil && kind == "application/x-www-form-urlencoded" {
		err = r.ParseForm()
	}
	if err != nil || kind != "application/x-www-form-urlencoded" {
		s.pages.Refuse(w, r, problem.New(http.StatusUnsupportedMediaType, "this is not the form of GET /login"))
		return
	}
	next := afterLogin(r.PostForm.Get("next"))
	right, err := s.gate.isToken(r, strings.TrimSpace(r.PostForm.Get("token")))
	wait, waits := errors.AsType[*credentials.Wait](err)
	switch {
	case waits:
		w.Header().Set("Retry-After", strconv.Itoa(wait.Seconds()))
		s.pages.LogIn(w, r, http.StatusTooManyRequests, next, fmt.Sprintf("Too many wrong tokens came from here. Try again in %d s.", wait.Seconds()))
	case !right:
		s.pages.LogIn(w, r, http.StatusUnauthorized, next, "This is not the admin token.")
	default:
		http.SetCookie(w, s.gate.sessions.begin(r))
		http.Redirect(w, r, next, http.StatusSeeOther)
	}
}

// unlessLoggedIn leads on who needs no login page.
func (s *server) unlessLoggedIn(page http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Add("Vary", "Cookie")
		login, err := s.gate.sessions.of(r)
		switch {
		case err != nil: // whether there is a login is not known
		case login != nil:
			http.Redirect(w, r, afterLogin(r.URL.Query().Get("next")), http.StatusSeeOther)
			return
		default:
			s.gate.sessions.forget(w, r)
		}
		page.ServeHTTP(w, r)
	})
}

// logOut ends the login, at every process, and takes the cookie away. A login that could not be ended keeps its cookie.
func (s *server) logOut(w http.ResponseWriter, r *http.Request) {
	if err := s.gate.sessions.revoke(r); err != nil {
		s.pages.Refuse(w, r, err)
		return
	}
	http.SetCookie(w, s.gate.sessions.end(r))
	http.Redirect(w, r, "/login", http.StatusSeeOther)
}

// afterLogin is where to go with a login: a path of this server that is none of the login's own.
func afterLogin(next string) string {
	next = local.Path(next)
	if path, _, _ := strings.Cut(next, "?"); path == "/login" || path == "/logout" {
		return "/"
	}
	return next
}

// refusePage answers a person: who has to log in first is shown how.
func (s *server) refusePage(w http.ResponseWriter, r *http.Request, err error) {
	told, _ := problem.Of(err)
	if told.Status != http.StatusUnauthorized {
		s.pages.Refuse(w, r, err)
		return
	}
	w.Header().Del("WWW-Authenticate")
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		s.pages.Refuse(w, r, problem.New(http.StatusUnauthorized, "nobody is logged in here, or no longer; log in, and do it again"))
		return
	}
	s.gate.sessions.forget(w, r)
	to := "/login"
	if next := afterLogin(r.URL.RequestURI()); next != "/" {
		to += "?next=" + url.QueryEscape(next)
	}
	http.Redirect(w, r, to, http.StatusSeeOther)
}

// wantsPage reports a browser that shows what it gets.
func wantsPage(r *http.Request) bool { return strings.Contains(r.Header.Get("Accept"), "text/html") }
