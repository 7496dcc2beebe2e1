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

	"github.com/lanekeeper/lanekeeper/internal/origin"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
)

// flash is the message of an action for the next page. A signed cookie carries it, because another process may render
// that page.
type flash struct {
	Text  string `json:"t"`
	Bad   bool   `json:"b,omitempty"`
	Trace string `json:"tr,omitempty"`
}

const (
	flashCookie = "lanekeeper_flash"
	flashTTL    = time.Minute
	// maxFlash bounds a message, because a cookie holds four kilobytes.
	maxFlash = 600
)

// setFlash stores a message for the next page.
func (room *Room) setFlash(w http.ResponseWriter, r *http.Request, f flash) {
	f.Text = textcut.Text(f.Text, maxFlash)
	text, err := json.Marshal(f)
	if err != nil {
		room.Logger.ErrorContext(r.Context(), "flash message not stored", "error", err)
		return
	}
	body := strconv.FormatInt(time.Now().Add(flashTTL).Unix(), 36) + "." + base64.RawURLEncoding.EncodeToString(text)
	http.SetCookie(w, &http.Cookie{
		Name: origin.CookieName(r, flashCookie), Value: body + "." + room.sign(body), Path: "/",
		MaxAge:   int(flashTTL.Seconds()),
		HttpOnly: true, SameSite: http.SameSiteStrictMode, Secure: origin.ViaTLS(r),
	})
}

// popFlash returns and clears the stored message; nil for none.
func (room *Room) popFlash(w http.ResponseWriter, r *http.Request) *flash {
	c, err := r.Cookie(origin.CookieName(r, flashCookie))
	if err != nil || r.Method != http.MethodGet {
		return nil
	}
	http.SetCookie(w, &http.Cookie{
		Name: origin.CookieName(r, flashCookie), Path: "/", MaxAge: -1, HttpOnly: true, SameSite: http.SameSiteStrictMode,
		Secure: origin.ViaTLS(r),
	})
	return room.readFlash(c.Value)
}

// readFlash reads a message from a cookie. It returns nil for an unsigned or expired message.
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

// sign returns the signature of a flash message.
func (room *Room) sign(text string) string {
	mac := hmac.New(sha256.New, room.Key)
	mac.Write([]byte("flash " + text))
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}
