// Package modelcheck checks with real calls whether agents can work with a model. Each check is a task of an agent: a
// turn, a tool call and its result, a correction, a stream, a token limit, an image. Calls cost money; [Calls] counts
// them.
package modelcheck

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/models"
)

// The checks, in order.
const (
	Answers    = "answers"
	Tools      = "tools"
	Correction = "correction"
	Stream     = "stream"
	Limit      = "limit"
	Image      = "image"
	Dialect    = "dialect"
	Price      = "price"
)

// Status is the outcome of a check.
type Status string

// The outcomes.
const (
	Pass    Status = "pass"
	Fail    Status = "fail"
	Skipped Status = "skipped"
)

// Result is the outcome of a check, with its figures.
type Result struct {
	Check   string  `json:"check"`
	Status  Status  `json:"status"`
	Millis  int64   `json:"ms"`
	Calls   int     `json:"calls"` // sent requests, including refused ones
	CostUSD float64 `json:"cost_usd"`
	Detail  string  `json:"detail,omitempty"`
	Help    string  `json:"help,omitempty"` // the setting to change
}

// Target is a model with the settings of an agent.
type Target struct {
	Model  string `json:"model"`            // the client's model when empty
	Effort string `json:"effort,omitempty"` // AGENT_REASONING_EFFORT when empty
}

// String describes the target for people.
func (t Target) String() string {
	if t.Effort == "" {
		return t.Model
	}
	return t.Model + " (effort " + t.Effort + ")"
}

const (
	callTimeout = 2 * time.Minute // models that reason are slow
	maxTokens   = 2048            // of a short answer, with reasoning before it
	fewTokens   = 16              // the smallest limit of the Responses API, which every server accepts
)

// withDefault returns the target, by default with the client's model.
func (t Target) withDefault(client *models.Client) Target {
	t.Model = cmp.Or(t.Model, client.Model())
	return t
}

// Calls returns how many calls [Run] makes if each passes. A skipped check makes none. Retries, and parts of the
// protocol that the server refuses, add calls.
func Calls(client *models.Client, t Target) int {
	if client.SupportsImages(t.withDefault(client).Model) {
		return 7
	}
	return 6
}

// Run makes all checks. It calls begin before each and done after it. If the server is not reached, or refuses the key
// or the model, it skips further calls. It returns an error only when ctx has ended.
func Run(ctx context.Context, client *models.Client, t Target, begin func(check string), done func(Result)) error {
	t = t.withDefault(client)
	p := &probe{client: client, target: t}
	for _, c := range []struct {
		name string
		run  func(context.Context) finding
	}{
		{Answers, p.answers},
		{Tools, p.tools},
		{Correction, p.correction},
		{Stream, p.stream},
		{Limit, p.limit},
		{Image, p.image},
		{Dialect, p.dialect},
		{Price, p.price},
	} {
		begin(c.name)
		p.calls, p.cost = 0, 0
		started := time.Now()
		result := skipped("the first call failed", "")
		if !p.useless || c.name == Price {
			result = c.run(ctx)
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("check model %s: %w", t.Model, err)
		}
		done(Result{
			Check: c.name, Status: result.status, Detail: result.detail, Help: result.help,
			Millis: time.Since(started).Milliseconds(), Calls: p.calls, CostUSD: p.cost,
		})
	}
	return nil
}

// finding is a [Result] without figures.
type finding struct {
	status       Status
	detail, help string
}

func passed(format string, args ...any) finding {
	return finding{Pass, fmt.Sprintf(format, args...), ""}
}

func skipped(detail, help string) finding { return finding{Skipped, detail, help} }

func failed(help, format string, args ...any) finding {
	return finding{Fail, fmt.Sprintf(format, args...), help}
}

// probe checks one model.
type probe struct {
	client *models.Client
	target Target
	calls  int // of the running check
	cost   float64

	history  []models.Message // up to the model's tool call; nil before it
	refused  bool             // the server refused a request with a tool
	answered bool             // the server answered a request
	useless  bool             // further requests would fail as well
}

// ask sends a request to the model.
func (p *probe) ask(ctx context.Context, req models.Request) (models.Response, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	req.Model, req.Effort = p.target.Model, p.target.Effort
	req.MaxTokens = cmp.Or(req.MaxTokens, maxTokens)
	started := time.Now()
	resp, err := p.client.Complete(ctx, req)
	if errors.Is(err, context.DeadlineExceeded) {
		waited := time.Since(started).Round(time.Second)
		err = fmt.Errorf("the model did not answer within %s: %w", waited, context.DeadlineExceeded)
	}
	p.answered = p.answered || err == nil
	p.calls += resp.Attempts
	p.cost += resp.CostUSD
	return resp, err
}

// prompt returns a conversation with one message of the user.
func prompt(text string) []models.Message {
	return []models.Message{
		{Role: models.RoleSystem, Content: "You are checked for a first use. Be brief."},
		{Role: models.RoleUser, Content: text},
	}
}

func (p *probe) answers(ctx context.Context) finding {
	resp, err := p.ask(ctx, models.Request{Messages: prompt("Say ok.")})
	if failure, ok := errors.AsType[*models.Error](err); ok {
		refusals := []int{http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound}
		p.useless = failure.Unreachable() || slices.Contains(refusals, failure.Status)
	}
	return answered(resp, err)
}

// answered passes if the answer has text.
func answered(resp models.Response, err error) finding {
	switch {
	case err != nil:
		return failed(Help(err), "%s", err)
	case resp.Message.Text() == "" && resp.FinishReason == models.FinishLength:
		return failed("set AGENT_REASONING_EFFORT to low", "%d tokens went into reasoning, and none into an answer",
			resp.Usage.CompletionTokens)
	case resp.Message.Refusal != "":
		return failed("set AGENT_MODEL to another model", "the model refused: %.60q", resp.Message.Refusal)
	case resp.Message.Text() == "":
		return failed("set AGENT_MODEL to another model", "the answer is empty (finish reason %s)", resp.FinishReason)
	}
	return passed("")
}

func (p *probe) stream(ctx context.Context) finding {
	started, first, pieces := time.Now(), time.Duration(0), 0
	var shown strings.Builder
	resp, err := p.ask(ctx, models.Request{
		Messages: prompt("Write the numbers from one to thirty in words."),
		OnDelta: func(text string) {
			if pieces == 0 {
				first = time.Since(started)
			}
			pieces++
			shown.WriteString(text)
		},
		OnRestart: func() {
			pieces = 0
			shown.Reset()
		},
	})
	if result := answered(resp, err); result.status != Pass {
		return result
	}
	switch {
	case shown.String() != resp.Message.Content:
		return failed("AGENT_MODEL_API may name another protocol", "the pieces do not add up to the answer")
	case pieces < 2:
		return passed("in one piece: readers wait for the whole answer")
	}
	return passed("%d pieces, the first after %s", pieces, first.Round(time.Millisecond))
}

func (p *probe) limit(ctx context.Context) finding {
	resp, err := p.ask(ctx, models.Request{
		Messages: prompt("Write the numbers from one to three hundred in words, all of them."), MaxTokens: fewTokens,
	})
	const help = "set AGENT_MODEL_EXTRA to the member that bounds answers at this server"
	switch {
	case err != nil:
		return failed(Help(err), "%s", err)
	case resp.FinishReason != models.FinishLength:
		return failed(help, "an answer bounded by %d tokens ended with %q after %d",
			fewTokens, resp.FinishReason, resp.Usage.CompletionTokens)
	case resp.Unknown:
		return failed(help, "the server goes beyond %d tokens; the answer was cut here, and may be billed whole", fewTokens)
	}
	return passed("cut by the server after %d tokens", resp.Usage.CompletionTokens)
}

func (p *probe) dialect(context.Context) finding {
	if !p.answered {
		return skipped("no call was answered", "")
	}
	learned := p.client.RejectedFeatures(p.target.Model)
	api := map[models.API]string{
		models.APIChat: "chat completions", models.APIResponses: "Responses API",
	}[p.client.API(p.target.Model)]
	if len(learned) == 0 {
		return passed("%s", api)
	}
	return passed("%s; learned here: %s", api, strings.Join(learned, ", "))
}

func (p *probe) price(context.Context) finding {
	price, known := p.client.Price(p.target.Model)
	if !known {
		return skipped("no price is known: limits in dollars do not bound this model", "set AGENT_PRICES")
	}
	return passed("%s per million tokens", price)
}

// Help names the setting to change after a failed call.
func Help(err error) string {
	failure, ok := errors.AsType[*models.Error](err)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return "set AGENT_REASONING_EFFORT lower, or AGENT_MODEL to a faster model"
	case !ok:
		return ""
	}
	message := strings.ToLower(failure.Code + " " + failure.Message)
	contains := func(texts ...string) bool {
		for _, text := range texts {
			if strings.Contains(message, text) {
				return true
			}
		}
		return false
	}
	switch {
	case failure.Status == http.StatusUnauthorized, failure.Status == http.StatusForbidden:
		return `set OPENAI_API_KEY; for a server that wants the key elsewhere, AGENT_MODEL_HEADERS: {"api-key":"…"}`
	case contains("insufficient_quota", "billing", "credit"):
		return "pay at the provider, or set another OPENAI_API_KEY"
	case failure.Status == http.StatusTooManyRequests:
		return "wait, or raise the provider's limit"
	case contains("api-version"):
		return `set AGENT_MODEL_QUERY: {"api-version":"…"}`
	case contains("/responses", "responses api"):
		return "set AGENT_MODEL_API to auto or responses"
	case failure.Status == http.StatusNotFound:
		return "set AGENT_MODEL to a model of `agent models ls`, OPENAI_BASE_URL to the path before " +
			"/chat/completions, or AGENT_MODEL_API to chat"
	case contains("context_length", "context length", "context size"):
		return "set AGENT_CONTEXT_TOKENS lower, or AGENT_MODEL to a model with more context"
	case contains("reasoning", "effort", "thinking"):
		return "set AGENT_REASONING_EFFORT to a word that the model takes, or leave it out"
	case contains("tool", "function"):
		return toolHelp
	case failure.Unreachable(), contains("openai_base_url"):
		return "set OPENAI_BASE_URL to where the server listens"
	case failure.Status == 0, failure.Status >= http.StatusInternalServerError:
		return "look into the server's log"
	}
	return "set AGENT_MODEL_EXTRA, which changes members of each request: null takes one away"
}

const (
	toolName   = "temperature"
	toolSchema = `{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}`
)

// tools lists the one tool that the model may call.
func tools() []models.Tool {
	return []models.Tool{{
		Name: toolName, Description: "Return the temperature of a city in degrees Celsius.",
		Parameters: json.RawMessage(toolSchema),
	}}
}

// toolHelp is the help for a model that answers without calling the tool.
const toolHelp = "set AGENT_MODEL to a model that calls tools; a server of your own may need a flag for it " +
	"(vLLM: --enable-auto-tool-choice --tool-call-parser; llama.cpp: --jinja)"

// call requests a call of the tool and stores the conversation.
func (p *probe) call(ctx context.Context) finding {
	history := prompt("What is the temperature in Madrid? Call the tool temperature.")
	resp, err := p.ask(ctx, models.Request{Messages: history, Tools: tools()})
	if err != nil {
		p.refused = refusesTools(err)
		return failed(Help(err), "%s", err)
	}
	calls := resp.Message.ToolCalls
	if len(calls) == 0 {
		if result := answered(resp, nil); result.status != Pass {
			return result
		}
		return failed(toolHelp, "the model answered in words, and called no tool")
	}
	var arguments struct{ City string }
	if err := json.Unmarshal([]byte(calls[0].Arguments), &arguments); err != nil || calls[0].Name != toolName {
		return failed(toolHelp, "the model called %s with %s", calls[0].Name, calls[0].Arguments)
	}
	p.history = append(history, resp.Message)
	return passed("")
}

// results adds a result of each call to the conversation.
func (p *probe) results(text string) []models.Message {
	history := slices.Clone(p.history)
	for _, c := range history[len(history)-1].ToolCalls {
		history = append(history, models.Message{
			Role: models.RoleTool, ToolCallID: c.ID, Name: c.Name, Content: text,
		})
	}
	return history
}

func (p *probe) tools(ctx context.Context) finding {
	if result := p.call(ctx); result.status != Pass {
		return result
	}
	resp, err := p.ask(ctx, models.Request{Messages: p.results(`{"celsius":21}`), Tools: tools()})
	if err == nil && len(resp.Message.ToolCalls) > 0 {
		return failed("set AGENT_MODEL to another model", "the model called the tool again in place of an answer")
	}
	return answered(resp, err)
}

// correction refuses the arguments of the call, with the text that an agent would send.
func (p *probe) correction(ctx context.Context) finding {
	if p.history == nil {
		return skipped("no tool was called", "")
	}
	history := append(p.results(`{"error":"INVALID_PARAMS"}`), models.Message{
		Role: models.RoleSystem, Content: fmt.Sprintf(
			"Tool call failed: INVALID_PARAMS. Schema: %s Errors: city: write it with its country", toolSchema),
	})
	resp, err := p.ask(ctx, models.Request{Messages: history, Tools: tools()})
	if err == nil && len(resp.Message.ToolCalls) > 0 {
		return passed("the call was corrected")
	}
	return answered(resp, err)
}

const noImages = "this model takes no images"

func (p *probe) image(ctx context.Context) finding {
	if !p.client.SupportsImages(p.target.Model) {
		return skipped(noImages, "")
	}
	picture, err := redSquare()
	if err != nil {
		return failed("", "%s", err)
	}
	history := prompt("What colour is this square? Answer in one English word.")
	history[1].Parts = []models.Part{{Image: &models.Image{URL: picture}}}
	resp, err := p.ask(ctx, models.Request{Messages: history})
	result := answered(resp, err)
	switch {
	case result.status != Pass:
		return result
	case !p.client.SupportsImages(p.target.Model):
		return skipped(noImages+": the server refused one", "")
	case !strings.Contains(strings.ToLower(resp.Message.Text()), "red"):
		return failed("set AGENT_MODEL to a model that takes images, if agents get any",
			"asked for the colour of a red square, the model said %.60q", resp.Message.Text())
	}
	return passed("")
}

// redSquare is an image of the smallest size that models accept.
func redSquare() (string, error) {
	picture := image.NewRGBA(image.Rect(0, 0, 64, 64))
	draw.Draw(picture, picture.Bounds(), image.NewUniform(color.RGBA{R: 255, A: 255}), image.Point{}, draw.Src)
	var out bytes.Buffer
	if err := png.Encode(&out, picture); err != nil {
		return "", fmt.Errorf("encode image: %w", err)
	}
	return "data:image/png;base64," + base64.StdEncoding.EncodeToString(out.Bytes()), nil
}

// Once makes one call with a tool and, if the server refuses it, one without. It returns the results of [Answers] and
// [Tools].
func Once(ctx context.Context, client *models.Client, t Target) (answers, tools Result) {
	p := &probe{client: client, target: t.withDefault(client)}
	called := p.call(ctx)
	answer := called
	switch {
	case p.refused:
		answer = p.answers(ctx)
	case called.help == toolHelp:
		answer = passed("") // with text instead of a call
	}
	return Result{Check: Answers, Status: answer.status, Detail: answer.detail, Help: answer.help},
		Result{Check: Tools, Status: called.status, Detail: called.detail, Help: called.help}
}

// refusesTools reports whether a call may have failed for its tools alone.
func refusesTools(err error) bool {
	failure, ok := errors.AsType[*models.Error](err)
	return ok && failure.Status != 0 && failure.Status != http.StatusUnauthorized &&
		failure.Status != http.StatusForbidden && failure.Status != http.StatusTooManyRequests
}
