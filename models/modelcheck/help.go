package modelcheck

import (
	"context"
	"errors"
	"net/http"
	"strings"

	"github.com/lanekeeper/lanekeeper/models"
)

// Help names the setting that helps against a failed call.
func Help(err error) string {
	failure, ok := errors.AsType[*models.Error](err)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return "set AGENT_REASONING_EFFORT lower, or AGENT_MODEL to a faster model"
	case !ok:
		return ""
	}
	words := strings.ToLower(failure.Code + " " + failure.Message)
	says := func(texts ...string) bool {
		for _, text := range texts {
			if strings.Contains(words, text) {
				return true
			}
		}
		return false
	}
	switch {
	case failure.Status == http.StatusUnauthorized, failure.Status == http.StatusForbidden:
		return `set OPENAI_API_KEY; for a server that wants the key elsewhere, AGENT_MODEL_HEADERS: {"api-key":"…"}`
	case says("insufficient_quota", "billing", "credit"):
		return "pay at the provider, or set another OPENAI_API_KEY"
	case failure.Status == http.StatusTooManyRequests:
		return "wait, or raise the provider's limit"
	case says("api-version"):
		return `set AGENT_MODEL_QUERY: {"api-version":"…"}`
	case says("/responses", "responses api"):
		return "set AGENT_MODEL_API to auto or responses"
	case failure.Status == http.StatusNotFound:
		return "set AGENT_MODEL to a model of `agent models ls`, OPENAI_BASE_URL to the path before " +
			"/chat/completions, or AGENT_MODEL_API to chat"
	case says("reasoning", "effort", "thinking"):
		return "set AGENT_REASONING_EFFORT to a word that the model takes, or leave it out"
	case says("tool", "function"):
		return wantedTool
	case failure.Status == 0:
		return "set OPENAI_BASE_URL to where the server listens"
	case failure.Status >= http.StatusInternalServerError:
		return "look into the server's log"
	}
	return "set AGENT_MODEL_EXTRA, which changes members of each request: null takes one away"
}
