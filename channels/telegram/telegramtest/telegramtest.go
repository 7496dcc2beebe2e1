// Package telegramtest is a Bot API for tests, on the loopback. It keeps chats and long-polls. It treats long texts and
// wrong markup as badly as Telegram does, repeats and reorders updates, and fails on demand. grammY drives it in this
// package's test.
package telegramtest

import (
	"encoding/json"
	"fmt"
	"html"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf16"
)

// Token is the token of the bot.
const Token = "4711:secret-of-the-bot"

// Fault is the fate of a request.
type Fault int

// The faults.
const (
	None   Fault = iota
	Slow         // 429 with retry_after
	Lost         // done, and the connection breaks before the answer
	Broken       // 502, not done
	Taken        // 409, as while another program polls
)

// Message is a message in a chat.
type Message struct {
	ID      int64
	Chat    int64
	Text    string // as HTML
	Buttons map[string]string
	Edits   int
}

// Server is the Bot API.
type Server struct {
	tb      testing.TB
	url     string
	closing chan struct{}

	mu       sync.Mutex
	waiting  []map[string]any // updates, by id
	next     int64            // id of the next update
	message  int64
	sent     []*Message
	notices  []string
	typed    int
	fault    func(method string, body map[string]any) Fault
	files    map[string][]byte
	shuffles bool
	arrived  chan struct{}
}

// New starts a server until the end of the test.
func New(tb testing.TB) *Server {
	tb.Helper()
	s := &Server{
		tb: tb, next: 1000, message: 1, closing: make(chan struct{}), arrived: make(chan struct{}),
		files: map[string][]byte{},
	}
	server := httptest.NewServer(s)
	s.url = server.URL
	tb.Cleanup(func() {
		close(s.closing)
		server.CloseClientConnections()
		server.Close()
	})
	return s
}

// URL is the base_url of a channel.
func (s *Server) URL() string { return s.url }

// Fail makes f decide about requests.
func (s *Server) Fail(f func(method string, body map[string]any) Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = f
}

// Shuffle makes answers to getUpdates unordered.
func (s *Server) Shuffle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shuffles = true
}

// Say posts a text of a person and returns the id of the message.
func (s *Server) Say(chat, from int64, name, text string) int64 {
	return s.say(chat, from, name, map[string]any{"text": text})
}

// Attach posts a document with a caption.
func (s *Server) Attach(chat, from int64, name, caption, file, kind string, content []byte) {
	s.mu.Lock()
	id := fmt.Sprintf("file%d", len(s.files))
	s.files[id] = content
	s.mu.Unlock()
	s.say(chat, from, name, map[string]any{"caption": caption, "document": map[string]any{
		"file_id": id, "file_unique_id": id, "file_name": file, "mime_type": kind, "file_size": len(content),
	}})
}

func (s *Server) say(chat, from int64, name string, more map[string]any) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.message++
	m := map[string]any{
		"message_id": s.message, "date": time.Now().Unix(), "chat": map[string]any{"id": chat, "type": "private"},
		"from": map[string]any{"id": from, "is_bot": false, "first_name": name},
	}
	maps.Copy(m, more)
	s.push(map[string]any{"message": m})
	return s.message
}

// Repeat delivers the last n updates once more, under new ids.
func (s *Server) Repeat(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, u := range slices.Clone(s.waiting[max(0, len(s.waiting)-n):]) {
		again := maps.Clone(u)
		delete(again, "update_id")
		s.push(again)
	}
}

// Click presses a button of a message. id is the id of the click.
func (s *Server) Click(id string, chat, from int64, name string, message int64, data string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.push(map[string]any{"callback_query": map[string]any{
		"id": id, "data": data, "chat_instance": "1",
		"from": map[string]any{"id": from, "is_bot": false, "first_name": name},
		"message": map[string]any{
			"message_id": message, "date": time.Now().Unix(), "chat": map[string]any{"id": chat, "type": "private"},
		},
	}})
}

func (s *Server) push(u map[string]any) {
	u["update_id"] = s.next
	s.next++
	s.waiting = append(s.waiting, u)
	close(s.arrived)
	s.arrived = make(chan struct{})
}

// Sent returns the messages of a chat in their present form; of all chats for 0.
func (s *Server) Sent(chat int64) (list []Message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.sent {
		if chat == 0 || m.Chat == chat {
			list = append(list, *m)
		}
	}
	return list
}

// Notices returns the answers to clicks.
func (s *Server) Notices() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.notices)
}

// Typed returns the number of times that the bot showed that it types.
func (s *Server) Typed() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.typed
}

// ServeHTTP implements the Bot API.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if path, is := strings.CutPrefix(r.URL.Path, "/file/bot"+Token+"/"); is {
		s.mu.Lock()
		content := s.files[path]
		s.mu.Unlock()
		_, _ = w.Write(content)
		return
	}
	method, known := strings.CutPrefix(r.URL.Path, "/bot"+Token+"/")
	if !known {
		refuse(w, http.StatusNotFound, "Not Found", 0)
		return
	}
	body := map[string]any{}
	raw, err := io.ReadAll(r.Body)
	if err == nil && len(raw) > 0 {
		err = json.Unmarshal(raw, &body)
	}
	if err != nil {
		refuse(w, http.StatusBadRequest, "Bad Request: "+err.Error(), 0)
		return
	}
	s.mu.Lock()
	fault := None
	if s.fault != nil {
		fault = s.fault(method, body)
	}
	s.mu.Unlock()
	switch fault {
	case None, Lost:
	case Slow:
		refuse(w, http.StatusTooManyRequests, "Too Many Requests: retry after 1", 1)
		return
	case Broken:
		http.Error(w, "Bad Gateway", http.StatusBadGateway)
		return
	case Taken:
		refuse(w, http.StatusConflict, "Conflict: terminated by other getUpdates request", 0)
		return
	}
	result, problem := s.call(r, method, body)
	switch {
	case fault == Lost:
		panic(http.ErrAbortHandler)
	case problem != "":
		refuse(w, http.StatusBadRequest, "Bad Request: "+problem, 0)
	default:
		answer(w, map[string]any{"ok": true, "result": result})
	}
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

func refuse(w http.ResponseWriter, code int, description string, retryAfter int) {
	v := map[string]any{"ok": false, "error_code": code, "description": description}
	if retryAfter > 0 {
		v["parameters"] = map[string]any{"retry_after": retryAfter}
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(v)
}

// call executes a method. problem is a 400.
func (s *Server) call(r *http.Request, method string, body map[string]any) (result any, problem string) {
	switch method {
	case "getUpdates":
		return s.updates(r, int64(number(body["offset"])), time.Duration(number(body["timeout"]))*time.Second), ""
	case "getMe":
		return map[string]any{
			"id": 4711, "is_bot": true, "first_name": "Shop", "username": "shop_bot", "can_join_groups": true,
			"can_read_all_group_messages": false, "supports_inline_queries": false,
		}, ""
	case "getWebhookInfo":
		return map[string]any{"url": "https://example.com/channels/support", "pending_update_count": 0}, ""
	case "getFile":
		return map[string]any{"file_id": body["file_id"], "file_unique_id": body["file_id"], "file_path": body["file_id"]}, ""
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch method {
	case "sendMessage":
		return s.send(body)
	case "editMessageText":
		return s.edit(body)
	case "answerCallbackQuery":
		s.notices = append(s.notices, fmt.Sprint(body["text"]))
	case "sendChatAction":
		s.typed++
	case "deleteWebhook", "setWebhook", "setMyCommands":
	default:
		return nil, "unknown method " + method
	}
	return true, ""
}

func number(v any) float64 {
	switch v := v.(type) {
	case float64:
		return v
	case string:
		n, _ := strconv.ParseFloat(v, 64)
		return n
	}
	return 0
}

// updates waits for updates from an offset on. It confirms and removes earlier ones.
func (s *Server) updates(r *http.Request, offset int64, timeout time.Duration) []map[string]any {
	deadline := time.After(timeout)
	for {
		s.mu.Lock()
		s.waiting = slices.DeleteFunc(s.waiting, func(u map[string]any) bool { return u["update_id"].(int64) < offset })
		list := slices.Clone(s.waiting[:min(100, len(s.waiting))])
		if s.shuffles {
			rand.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
		}
		arrived := s.arrived
		s.mu.Unlock()
		if len(list) > 0 {
			return list
		}
		select {
		case <-arrived:
		case <-deadline:
			return []map[string]any{}
		case <-r.Context().Done():
			return nil
		case <-s.closing:
			return nil
		}
	}
}

func (s *Server) send(body map[string]any) (any, string) {
	text, problem := checkText(body)
	if problem != "" {
		return nil, problem
	}
	s.message++
	m := &Message{ID: s.message, Chat: int64(number(body["chat_id"])), Text: text, Buttons: buttons(body)}
	s.sent = append(s.sent, m)
	return shownMessage(m), ""
}

func (s *Server) edit(body map[string]any) (any, string) {
	text, problem := checkText(body)
	if problem != "" {
		return nil, problem
	}
	for _, m := range s.sent {
		if m.ID != int64(number(body["message_id"])) || m.Chat != int64(number(body["chat_id"])) {
			continue
		}
		if m.Text == text && len(m.Buttons) == len(buttons(body)) {
			return nil, "message is not modified: specified new message content and reply markup are exactly the same"
		}
		m.Text, m.Buttons, m.Edits = text, buttons(body), m.Edits+1
		return shownMessage(m), ""
	}
	return nil, "message to edit not found"
}

func shownMessage(m *Message) any {
	return map[string]any{
		"message_id": m.ID, "date": time.Now().Unix(), "text": m.Text,
		"chat": map[string]any{"id": m.Chat, "type": "private"},
		"from": map[string]any{"id": 4711, "is_bot": true, "first_name": "Shop"},
	}
}

func buttons(body map[string]any) map[string]string {
	all := map[string]string{}
	markup, _ := body["reply_markup"].(map[string]any)
	rows, _ := markup["inline_keyboard"].([]any)
	for _, row := range rows {
		for _, b := range row.([]any) {
			b := b.(map[string]any)
			all[fmt.Sprint(b["text"])] = fmt.Sprint(b["callback_data"])
		}
	}
	return all
}

var tag = regexp.MustCompile(`<(/?)([a-z]+)((?:\s[^<>]*)?)>`)

// checkText refuses the same texts as Telegram.
func checkText(body map[string]any) (text, problem string) {
	text = fmt.Sprint(body["text"])
	shown := text
	if body["parse_mode"] == "HTML" {
		var open []string
		for _, m := range tag.FindAllStringSubmatch(text, -1) {
			switch {
			case !slices.Contains([]string{"b", "i", "u", "s", "code", "pre", "a", "blockquote"}, m[2]):
				return "", "can't parse entities: unsupported start tag \"" + m[2] + "\""
			case m[1] == "":
				open = append(open, m[2])
			case len(open) == 0 || open[len(open)-1] != m[2]:
				return "", "can't parse entities: unmatched end tag"
			default:
				open = open[:len(open)-1]
			}
		}
		shown = tag.ReplaceAllString(text, "")
		if len(open) > 0 || strings.ContainsAny(shown, "<>") {
			return "", "can't parse entities: can't find end tag"
		}
		shown = html.UnescapeString(shown)
	}
	units := len(utf16.Encode([]rune(shown)))
	switch {
	case strings.TrimSpace(shown) == "":
		return "", "message text is empty"
	case units > 4096:
		return "", "message is too long"
	}
	for _, data := range buttons(body) {
		if len(data) > 64 {
			return "", "BUTTON_DATA_INVALID"
		}
	}
	return text, ""
}
