package telegram

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/channels"
)

// call calls a method of the Bot API. Its error is a [channels.SendError], which says whether the request was sent.
func (t *transport) call(ctx context.Context, method string, parameters map[string]any, into any) error {
	timeout := callTimeout
	if method == "getUpdates" {
		timeout += pollSeconds * time.Second
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	body, err := json.Marshal(parameters)
	if err != nil {
		return channels.NotSent(fmt.Errorf("encode %s: %w", method, err))
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, t.base+"/bot"+t.token+"/"+method, bytes.NewReader(body))
	if err != nil {
		return channels.NotSent(t.hide(err))
	}
	r.Header.Set("Content-Type", "application/json")
	response, err := channels.Do(t.config.Client, r)
	if err != nil {
		_, unsent := errors.AsType[*channels.SendError](err)
		return &channels.SendError{Err: fmt.Errorf("call %s: %w", method, t.hide(err)), MaybeSent: !unsent}
	}
	defer response.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(response.Body, maxAnswer))
	if err != nil {
		return &channels.SendError{Err: fmt.Errorf("read answer to %s: %w", method, t.hide(err)), MaybeSent: true}
	}
	var result struct {
		OK          bool            `json:"ok"`
		Result      json.RawMessage `json:"result"`
		Code        int             `json:"error_code"`
		Description string          `json:"description"`
		Parameters  struct {
			RetryAfter int   `json:"retry_after"`
			MovedTo    int64 `json:"migrate_to_chat_id"`
		} `json:"parameters"`
	}
	if err := json.Unmarshal(raw, &result); err != nil {
		return &channels.SendError{
			Err: fmt.Errorf("telegram answered %d to %s, and no JSON", response.StatusCode, method), MaybeSent: true,
		}
	}
	if !result.OK {
		refused := &apiError{cmp.Or(result.Code, response.StatusCode), result.Description, result.Parameters.MovedTo}
		return sendError(refused, result.Parameters.RetryAfter)
	}
	if into == nil {
		return nil
	}
	if err := json.Unmarshal(result.Result, into); err != nil {
		return &channels.SendError{Err: fmt.Errorf("telegram's answer to %s cannot be read", method), MaybeSent: true}
	}
	return nil
}

// apiError is an error response of the Bot API.
type apiError struct {
	Code        int
	Description string
	MovedTo     int64 // the supergroup that a group has become
}

func (e *apiError) Error() string {
	text := fmt.Sprintf("telegram answered %d: %s", e.Code, e.Description)
	if e.MovedTo != 0 {
		text += fmt.Sprintf("; its id is %d now: write that into report_to", e.MovedTo)
	}
	return text
}

// sendError classifies an error response by its status. For a wrong token, the description is the bare "Not Found"; for
// an unknown chat or message it is longer.
func sendError(refused *apiError, retryAfter int) error {
	e, code := &channels.SendError{Err: refused}, refused.Code
	switch {
	case code == http.StatusTooManyRequests:
		e.RetryAfter = time.Duration(max(retryAfter, 1)) * time.Second
	case code == http.StatusUnauthorized || code == http.StatusNotFound && refused.Description == "Not Found":
		// Not "token: …": package redact would hide the reason.
		e.Err = fmt.Errorf("%w: Telegram does not know this token (%w)", channels.ErrMisconfigured, e.Err)
	case code == http.StatusConflict:
		e.Err = fmt.Errorf("%w: another program polls this bot, or has set a webhook: %w", channels.ErrMisconfigured, e.Err)
	case code >= http.StatusInternalServerError:
		e.MaybeSent = true
	default:
		e.Permanent = true
	}
	return e
}

// hide removes the URL and the token from an error.
func (t *transport) hide(err error) error {
	if err == nil {
		return nil
	}
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err
	}
	if strings.Contains(err.Error(), t.token) {
		return errors.New(strings.ReplaceAll(err.Error(), t.token, "TOKEN"))
	}
	return err
}

// Fetch implements [channels.Fetcher].
func (t *transport) Fetch(ctx context.Context, f channels.File, limit int64) ([]byte, error) {
	if f.Size > limit {
		return nil, fmt.Errorf("the file has %d bytes, more than %d", f.Size, limit)
	}
	var found file
	if err := t.call(ctx, "getFile", map[string]any{"file_id": f.ID}, &found); err != nil {
		return nil, err
	}
	if found.Path == "" || strings.Contains(found.Path, "..") {
		return nil, errors.New("telegram names no file")
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, t.base+"/file/bot"+t.token+"/"+found.Path, http.NoBody)
	if err != nil {
		return nil, t.hide(err)
	}
	response, err := t.config.Client.Do(r)
	if err != nil {
		return nil, t.hide(err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("telegram answered %d for the file", response.StatusCode)
	}
	data, err := io.ReadAll(io.LimitReader(response.Body, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("the file has more than %d bytes", limit)
	}
	return data, t.hide(err)
}
