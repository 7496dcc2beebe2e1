package modelcheck

import (
	"bytes"
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

	"github.com/lanekeeper/lanekeeper/models"
)

const (
	toolName   = "temperature"
	toolSchema = `{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}`
)

// tool is what the model is to call.
func tool() []models.Tool {
	return []models.Tool{{
		Name: toolName, Description: "Return the temperature of a city in degrees Celsius.",
		Parameters: json.RawMessage(toolSchema),
	}}
}

// wantedTool is the help where a model that answers calls no tool.
const wantedTool = "set AGENT_MODEL to one that calls tools; a server of your own may need a flag for it " +
	"(vLLM: --enable-auto-tool-choice --tool-call-parser; llama.cpp: --jinja)"

// call asks for a call of the tool, and keeps it.
func (p *probe) call(ctx context.Context) finding {
	history := words("What is the temperature in Madrid? Call the tool temperature.")
	resp, err := p.ask(ctx, models.Request{Messages: history, Tools: tool()})
	if err != nil {
		p.refused = refusesTools(err)
		return failed(Help(err), "%s", err)
	}
	calls := resp.Message.ToolCalls
	if len(calls) == 0 {
		if found := spoken(resp, nil); found.status != Pass {
			return found
		}
		return failed(wantedTool, "the model answered in words, and called no tool")
	}
	var arguments struct{ City string }
	if err := json.Unmarshal([]byte(calls[0].Arguments), &arguments); err != nil || calls[0].Name != toolName {
		return failed(wantedTool, "the model called %s with %s", calls[0].Name, calls[0].Arguments)
	}
	p.asked, p.called = append(history, resp.Message), &calls[0]
	return passed("")
}

// results answers each call of the conversation.
func (p *probe) results(text string) []models.Message {
	history := slices.Clone(p.asked)
	for _, c := range history[len(history)-1].ToolCalls {
		history = append(history, models.Message{
			Role: models.RoleTool, ToolCallID: c.ID, Name: c.Name, Content: text,
		})
	}
	return history
}

func (p *probe) tools(ctx context.Context) finding {
	if found := p.call(ctx); found.status != Pass {
		return found
	}
	resp, err := p.ask(ctx, models.Request{Messages: p.results(`{"celsius":21}`), Tools: tool()})
	if err == nil && len(resp.Message.ToolCalls) > 0 {
		return failed("set AGENT_MODEL to another model", "the model called the tool again in place of an answer")
	}
	return spoken(resp, err)
}

// correction follows a call whose arguments were refused, as agents say it.
func (p *probe) correction(ctx context.Context) finding {
	if p.called == nil {
		return skipped("no tool was called", "")
	}
	history := append(p.results(`{"error":"INVALID_PARAMS"}`), models.Message{
		Role: models.RoleSystem, Content: fmt.Sprintf(
			"Tool call failed: INVALID_PARAMS. Schema: %s Errors: city: write it with its country", toolSchema),
	})
	resp, err := p.ask(ctx, models.Request{Messages: history, Tools: tool()})
	if err == nil && len(resp.Message.ToolCalls) > 0 {
		return passed("the call was corrected")
	}
	return spoken(resp, err)
}

const noImages = "this model takes no images"

func (p *probe) image(ctx context.Context) finding {
	if !p.client.TakesImages(p.target.Model) {
		return skipped(noImages, "")
	}
	picture, err := redSquare()
	if err != nil {
		return failed("", "%s", err)
	}
	history := words("What colour is this square? Answer in one English word.")
	history[1].Parts = []models.Part{{Image: &models.Image{URL: picture}}}
	resp, err := p.ask(ctx, models.Request{Messages: history})
	found := spoken(resp, err)
	switch {
	case found.status != Pass:
		return found
	case !p.client.TakesImages(p.target.Model):
		return skipped(noImages+": the server refused one", "")
	case !strings.Contains(strings.ToLower(resp.Message.Text()), "red"):
		return failed("set AGENT_MODEL to one that takes images, where agents get any",
			"asked for the colour of a red square, the model said %.60q", resp.Message.Text())
	}
	return passed("")
}

// redSquare is an image as large as the smallest that models take.
func redSquare() (string, error) {
	picture := image.NewRGBA(image.Rect(0, 0, 64, 64))
	draw.Draw(picture, picture.Bounds(), image.NewUniform(color.RGBA{R: 255, A: 255}), image.Point{}, draw.Src)
	var out bytes.Buffer
	if err := png.Encode(&out, picture); err != nil {
		return "", fmt.Errorf("encode image: %w", err)
	}
	return "data:image/png;base64," + base64.StdEncoding.EncodeToString(out.Bytes()), nil
}

// Once makes a single call with a tool, and a plain one after it where the server refuses that. It returns the
// results of [Answers] and [Tools].
func Once(ctx context.Context, client *models.Client, t Target) (answers, tools Result) {
	p := &probe{client: client, target: t.of(client)}
	called := p.call(ctx)
	said := called
	switch {
	case p.refused:
		said = p.answers(ctx)
	case called.help == wantedTool:
		said = passed("") // in words
	}
	return Result{Check: Answers, Status: said.status, Detail: said.detail, Help: said.help},
		Result{Check: Tools, Status: called.status, Detail: called.detail, Help: called.help}
}

// refusesTools reports whether a call may have failed for its tools alone.
func refusesTools(err error) bool {
	failure, ok := errors.AsType[*models.Error](err)
	return ok && failure.Status != 0 && failure.Status != http.StatusUnauthorized &&
		failure.Status != http.StatusForbidden && failure.Status != http.StatusTooManyRequests
}
