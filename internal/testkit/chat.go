package testkit

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"io"
	"net/http"
	"strings"
)

// Answer is what a client of the chat has received.
type Answer struct {
	Status   int    // 0: the connection broke before there was one
	ID       string // of the completion
	Text     string
	Code     string // of an error
	Complete bool   // it ended as the protocol says
	Header   http.Header
}

// Chat sends a request to the chat, on a connection of its own, and reads the answer as far as it comes. A streamed
// answer calls received after each chunk, if it is set.
func Chat(r *http.Request, received func(text string)) (a Answer) {
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(r)
	if err != nil {
		return a
	}
	defer response.Body.Close()
	a.Status, a.ID, a.Header = response.StatusCode, response.Header.Get("X-Completion-Id"), response.Header
	if strings.HasPrefix(a.Header.Get("Content-Type"), "text/event-stream") {
		a.stream(response.Body, received)
		return a
	}
	if raw, err := io.ReadAll(response.Body); err == nil {
		a.add(raw)
		a.Complete = a.Code == ""
	}
	return a
}

// stream reads chunks.
func (a *Answer) stream(body io.Reader, received func(text string)) {
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
		switch {
		case !ok:
		case string(data) == "[DONE]":
			a.Complete = a.Code == ""
		default:
			a.add(data)
			if received != nil {
				received(a.Text)
			}
		}
	}
}

// add adds a chunk, or a whole answer. A chunk that was cut off is dropped.
func (a *Answer) add(raw []byte) {
	var c struct {
		ID      string
		Choices []struct{ Delta, Message struct{ Content string } }
		Error   struct{ Code string }
	}
	if json.Unmarshal(raw, &c) != nil {
		return
	}
	a.ID, a.Code = cmp.Or(c.ID, a.ID), cmp.Or(c.Error.Code, a.Code)
	for _, choice := range c.Choices {
		a.Text += choice.Delta.Content + choice.Message.Content
	}
}
