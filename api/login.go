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
	"github.com/lanekeeper/lanekeeper/internal/origin"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/principals"
)

// Pages render responses for browsers.
type Pages interface {
	// LogIn renders the login form. next is the local path to open afterwards; wrong is the error message, or empty.
	LogIn(w http.ResponseWriter, r *http.Request, status int, next, wrong string)
	// Refuse renders an error page.
	Refuse(w http.ResponseWriter, r *http.Request, err error)
}

// maxForm bounds the login form in bytes.
const maxForm = 16 << 10

const (
	loginPath  = "/login"
	logoutPath = "/logout"
)

// loginRoutes returns the routes that set and delete the cookie. The login form itself is an endpoint.
func (s *server) loginRoutes() []route {
	if s.pages == nil {
		return nil
	}
	return []route{
		{
			method: "POST", path: loginPath, access: Public, page: true, maxBody: maxForm,
			httpHandler: http.HandlerFunc(s.logIn),
			about:       "Log in with the form of GET /login.",
		},
		{
			method: "POST", path: logoutPath, access: Public, page: true, maxBody: maxForm,
			httpHandler: http.HandlerFunc(s.logOut),
			about:       "End the login.",
		},
	}
}

// logIn exchanges the admin token, or the secret of a login link, for a cookie.
func (s *server) logIn(w http.ResponseWriter, r *http.Request) {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != "application/x-www-form-urlencoded" || r.ParseForm() != nil {
		s.pages.Refuse(w, r, problem.New(http.StatusUnsupportedMediaType, "send the form of GET /login"))
		return
	}
	next := afterLogin(r.PostForm.Get("next"))
	if link := strings.TrimSpace(r.PostForm.Get("link")); link != "" {
		s.startSession(w, r, next, principals.SessionParams{Link: link, Method: principals.WithLink})
		return
	}
	valid, err := s.auth.isAdminToken(r, strings.TrimSpace(r.PostForm.Get("token")))
	switch {
	case err != nil:
		s.refuseLogin(w, r, next, "tokens", err)
	case !valid:
		s.pages.LogIn(w, r, http.StatusUnauthorized, next, "This is not the admin token.")
	default:
		s.startSession(w, r, next, principals.SessionParams{Principal: principals.Root, Method: principals.WithToken})
	}
}

// refuseLogin responds to a throttled or failed login.
func (s *server) refuseLogin(w http.ResponseWriter, r *http.Request, next, what string, err error) {
	wait, ok := errors.AsType[*credentials.Wait](err)
	if !ok {
		s.pages.Refuse(w, r, err)
		return
	}
	w.Header().Set("Retry-After", strconv.Itoa(wait.Seconds()))
	s.pages.LogIn(w, r, http.StatusTooManyRequests, next,
		fmt.Sprintf("Too many wrong %s from this address. Try again in %d s.", what, wait.Seconds()))
}

// startSession starts a session and redirects to the next page.
func (s *server) startSession(w http.ResponseWriter, r *http.Request, next string, n principals.SessionParams) {
	err := s.auth.sessions.start(w, r, n)
	switch {
	case err == nil:
		http.Redirect(w, r, next, http.StatusSeeOther)
	case errors.Is(err, principals.ErrInactive):
		s.pages.LogIn(w, r, http.StatusForbidden, next, "This principal is disabled.")
	case errors.Is(err, principals.ErrNotFound):
		if err = s.auth.guard.Judge(r, credentials.Token, false, true); err != nil {
			s.refuseLogin(w, r, next, "links", err)
			return
		}
		s.pages.LogIn(w, r, http.StatusUnauthorized, next,
			"This link was used, has expired, or is invalid. Request another link.")
	default:
		s.pages.Refuse(w, r, err)
	}
}

// redirectLoggedIn skips the login page for a browser that is logged in. A login link may be of another principal.
func (s *server) redirectLoggedIn(page http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Add("Vary", "Cookie")
		caller, err := s.auth.sessions.current(r)
		switch {
		case err != nil: // the login state is unknown
		case caller != nil && r.URL.Query().Get("link") != "":
		case caller != nil:
			// The link may have the token in its fragment. Browsers keep a fragment unless the redirect has its own.
			http.Redirect(w, r, afterLogin(r.URL.Query().Get("next"))+"#", http.StatusSeeOther)
			return
		default:
			s.auth.sessions.clearCookie(w, r)
		}
		page.ServeHTTP(w, r)
	})
}

// logOut ends the session and deletes the cookie. If it cannot end the session, it keeps the cookie.
func (s *server) logOut(w http.ResponseWriter, r *http.Request) {
	if err := s.auth.sessions.revoke(r); err != nil {
		s.pages.Refuse(w, r, err)
		return
	}
	http.SetCookie(w, s.auth.sessions.logoutCookie(r))
	http.Redirect(w, r, loginPath, http.StatusSeeOther)
}

// afterLogin returns the local path to open after the login, never a login page.
func afterLogin(next string) string {
	next = origin.Path(next)
	if path, _, _ := strings.Cut(next, "?"); path == loginPath || path == logoutPath {
		return "/"
	}
	return next
}

// writeErrorPage renders an error. Without a login it redirects to the login page. The login leads back to the page or,
// for a form, to its referer. After a form, the login page says that nothing was done.
func (s *server) writeErrorPage(w http.ResponseWriter, r *http.Request, err error) {
	p, _ := problem.Of(err)
	if p.Status != http.StatusUnauthorized {
		s.pages.Refuse(w, r, err)
		return
	}
	w.Header().Del("WWW-Authenticate")
	s.auth.sessions.clearCookie(w, r)
	to, page, query := loginPath, r.URL.RequestURI(), url.Values{}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		page = origin.Referer(r)
		query.Set("unsent", "1")
	}
	if next := afterLogin(page); next != "/" {
		query.Set("next", next)
	}
	if len(query) > 0 {
		to += "?" + query.Encode()
	}
	http.Redirect(w, r, to, http.StatusSeeOther)
}

func wantsPage(r *http.Request) bool { return strings.Contains(r.Header.Get("Accept"), "text/html") }
