package models

import (
	"cmp"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// maxMessageRunes bounds the quoted message of a server.
const maxMessageRunes = 500

// Error is a failed request.
type Error struct {
	Status     int           // HTTP status, or the one inside a stream; 0 for none
	Code       string        // the server's code or type, such as rate_limit_exceeded; may be empty
	Message    string        // the server's or connection's message, bounded, on one line, without secrets
	Retryable  bool          // the same request may succeed later
	RetryAfter time.Duration // the wait that the server requests; 0 for none
	Advice     string        // an action for the operator, unless the status implies it

	param string // the parameter at fault
	cause error
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("call model: ")
	if e.Status != 0 {
		b.WriteString("status " + strconv.Itoa(e.Status) + ": ")
	}
	if e.Code != "" && e.Code != strconv.Itoa(e.Status) && !strings.Contains(e.Message, e.Code) {
		b.WriteString("(" + e.Code + ") ") // redaction would read "api_key: word" as a secret
	}
	b.WriteString(e.Message)
	if e.RetryAfter > 0 {
		b.WriteString("; retry after " + e.RetryAfter.Round(time.Millisecond).String())
	}
	if todo := e.operatorAdvice(); todo != "" {
		b.WriteString(" (" + todo + ")")
	}
	return b.String()
}

// Unwrap returns the connection's error.
func (e *Error) Unwrap() error { return e.cause }

// Unavailable reports whether another model may answer the request.
func (e *Error) Unavailable() bool {
	return e.Retryable || e.Code == codeNoQuota || e.Code == codeNoModel || e.Status == http.StatusPaymentRequired ||
		e.Status == http.StatusNotFound
}

// Unreachable reports whether no connection to the server was made.
func (e *Error) Unreachable() bool { return e.Code == codeUnreachable && e.cause != nil }

// operatorAdvice returns an action for the operator.
func (e *Error) operatorAdvice() string {
	switch {
	case e.Advice != "":
		return e.Advice
	case e.Code == codeContentFilter:
		return "the provider's content filter refused it"
	case e.Status == http.StatusUnauthorized, e.Status == http.StatusForbidden:
		return "check OPENAI_API_KEY"
	case e.Status == http.StatusNotFound:
		return "check AGENT_MODEL and OPENAI_BASE_URL"
	case e.Unreachable():
		return "check OPENAI_BASE_URL"
	}
	return ""
}

// scrubbed redacts the secrets of the configuration and texts that look like a key.
func (e *Error) scrubbed(secrets []string) *Error {
	clean := *e
	clean.Message = bounded(scrub(e.Message, secrets)) // in this order, so no part of a secret stays
	clean.Code = scrub(e.Code, secrets)
	clean.param = scrub(e.param, secrets)
	if clean.cause != nil && scrub(clean.cause.Error(), secrets) != clean.cause.Error() {
		clean.cause = errors.New(scrub(clean.cause.Error(), secrets))
	}
	return &clean
}

// secrets are the key and the values of headers and query, the longest first: a value may be part of another.
func (c Config) secrets() []string {
	all := []string{c.APIKey}
	for _, value := range c.Headers {
		all = append(all, value)
	}
	for _, values := range c.Query {
		for _, value := range values {
			all = append(all, value, url.QueryEscape(value))
		}
	}
	slices.SortFunc(all, func(a, b string) int { return cmp.Compare(len(b), len(a)) })
	return all
}

var looksSecret = regexp.MustCompile(`(?i)\b(?:sk|pk|key|gsk|xai)-[\w*.-]{6,}|\bbearer\s+[\w*.~+/=-]{6,}`)

func scrub(text string, secrets []string) string {
	for _, key := range secrets {
		if len(key) >= 4 { // a shorter value is a common part of other words
			text = strings.ReplaceAll(text, key, "[secret]")
		}
	}
	return looksSecret.ReplaceAllString(text, "[secret]")
}

// apiError returns the error of a response with a status other than 2xx.
func apiError(status int, header http.Header, body []byte) *Error {
	e := &Error{Status: status, RetryAfter: retryAfter(header, time.Now())}
	e.read(body)
	if e.Message == "" {
		e.Message = strings.ToLower(cmp.Or(http.StatusText(status), "refused"))
	}
	e.Retryable = status >= 500 || status == http.StatusTooManyRequests && e.Code != codeNoQuota
	return e
}

// streamError returns an error inside a stream. The server accepted the request, so the error is retryable unless its
// code or status says otherwise.
func streamError(chunk []byte) *Error {
	e := &Error{}
	e.read(chunk)
	if status, err := strconv.Atoi(e.Code); err == nil && status >= 400 && status < 600 {
		e.Status = status
	}
	e.Message = cmp.Or(e.Message, "the server reported an error without a message")
	switch e.Code {
	case codeNoQuota, "invalid_request_error", "context_length_exceeded", "content_filter", "authentication_error",
		"permission_error", "not_found_error", codeNoModel:
		return e
	}
	e.Retryable = e.Status == 0 || e.Status >= 500 || e.Status == http.StatusTooManyRequests
	return e
}

const (
	codeNoQuota     = "insufficient_quota"
	codeNoModel     = "model_not_found"
	codeUnreachable = "unreachable"

	codeContentFilter = "content_filter"

	adviseResponses = "set AGENT_MODEL_API to auto or responses"
)

// namesResponses reports whether the server demands the Responses API.
func (e *Error) namesResponses() bool {
	return e.Status == http.StatusBadRequest && strings.Contains(e.Message, "/v1/responses")
}

// read decodes the forms of errors that servers use: {"error":{…}}, {"error":"…"}, the fields at the top,
// {"detail":…}, one of these in a list, or text.
func (e *Error) read(body []byte) {
	var several []json.RawMessage
	if json.Unmarshal(body, &several) == nil && len(several) > 0 {
		body = several[0]
	}
	var top map[string]json.RawMessage
	if err := json.Unmarshal(body, &top); err != nil {
		e.Message = plainText(body)
		return
	}
	if nested := top["error"]; len(nested) > 0 {
		var inner map[string]json.RawMessage
		if err := json.Unmarshal(nested, &inner); err != nil {
			e.Message = oneLine(scalar(nested))
			return
		}
		top = inner
	}
	e.Message = oneLine(cmp.Or(scalar(top["message"]), scalar(top["detail"])))
	e.Code = cmp.Or(scalar(top["code"]), scalar(top["type"]))
	if word := scalar(top["status"]); word != "" && number(e.Code) != 0 { // Google's
		e.Status = cmp.Or(e.Status, number(e.Code))
		e.Code = word
	}
	if scalar(top["type"]) == codeNoQuota {
		e.Code = codeNoQuota
	}
	e.param = scalar(top["param"])
	if e.Message == "" {
		e.Message = oneLine(string(body))
	}
}

// number parses a text; 0 if it is no number.
func number(text string) int {
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0
	}
	return n
}

// scalar returns a JSON scalar as text: a string without quotes, empty for null.
func scalar(raw json.RawMessage) string {
	var s string
	if err := json.Unmarshal(raw, &s); err == nil {
		return s
	}
	return string(raw)
}

// plainText returns a body that is no JSON, cleaned for display.
func plainText(body []byte) string {
	text := strings.TrimSpace(string(body))
	if strings.HasPrefix(text, "<") {
		return "the server answered with a web page"
	}
	return oneLine(text)
}

func oneLine(text string) string {
	return strings.Join(strings.Fields(strings.ToValidUTF8(text, "�")), " ")
}

// bounded cuts a message at maxMessageRunes.
func bounded(text string) string {
	if r := []rune(text); len(r) > maxMessageRunes {
		return string(r[:maxMessageRunes]) + "…"
	}
	return text
}
