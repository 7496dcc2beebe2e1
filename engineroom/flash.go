package engineroom

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/local"
)

const (
	flashCookie = "lanekeeper_flash"
	flashLasts  = time.Minute
	// mostFlash is how many bytes of a message are kept: a cookie holds no more than four kilobytes.
	mostFlash = 600
)

// flash is what came of a lever. It goes through the browser, signed, because the page that shows it may be made by
// another process.
type flash struct {
	Text  string `json:"t"`
	Bad   bool   `json:"b,omitempty"`
	Trace string `json:"tr,omitempty"`
}

// setFlash leaves a message for the next page.
func (room *Room) setFlash(w http.ResponseWriter, r *http.Request, f flash) {
	if len(f.Text) > mostFlash {
		f.Text = strings.ToValidUTF8(f.Text[:mostFlash], "") + "…"
	}
	text, err := json.Marshal(f)
	if err != nil {
		room.Logger.ErrorContext(r.Context(), "message not left", "error", err)
		return
	}
	body := strconv.FormatInt(time.Now().Add(flashLasts).Unix(), 36) + "." + base64.RawURLEncoding.EncodeToString(text)
	http.SetCookie(w, &http.Cookie{
		Name: local.CookieName(r, flashCookie), Value: body + "." + room.sign(body), Path: "/", MaxAge: int(flashLasts.Seconds()),
		HttpOnly: true, SameSite: http.SameSiteStrictMode, Secure: viaTLS(r),
	})
}

// takeFlash is the message that was left, nil without one. It is shown once.
func (room *Room) takeFlash(w http.ResponseWriter, r *http.Request) *flash {
	c, err := r.Cookie(local.CookieName(r, flashCookie))
	if err != nil || r.Method != http.MethodGet {
		return nil
	}
	http.SetCookie(w, &http.Cookie{
		Name: local.CookieName(r, flashCookie), Path: "/", MaxAge: -1, HttpOnly: true, SameSite: http.SameSiteStrictMode, Secure: viaTLS(r),
	})
	return room.readFlash(c.Value)
}

// readFlash is nil for what this room did not sign, or not lately.
func (room *Room) readFlash(value string) *flash {
	at := strings.LastIndexByte(value, '.')
	if at < 0 || !hmac.Equal([]byte(value[at+1:]), []byte(room.sign(value[:at]))) {
		return nil
	}
	until, encoded, _ := strings.Cut(value[:at], ".")
	seconds, err := strconv.ParseInt(until, 36, 64)
	if err != nil || time.Now().Unix() > seconds {
		return nil
	}
	text, err := base64.RawURLEncoding.DecodeString(encoded)
	var f flash
	if err != nil || json.Unmarshal(text, &f) != nil {
		return nil
	}
	return &f
}

// sign is the signature of a text.
func (room *Room) sign(text string) string {
	mac := hmac.New(sha256.New, room.Key)
	mac.Write([]byte("flash " + text))
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

// viaTLS reports whether the browser spoke TLS, to us or to the proxy before us.
func viaTLS(r *http.Request) bool {
	return r.TLS != nil || strings.EqualFold(r.Header.Get("X-Forwarded-Proto"), "https")
}
