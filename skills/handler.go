package skills

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
)

// handler acts for one skill. args are valid and complete.
type handler interface {
	call(ctx context.Context, r *Registry, c Call, args map[string]any) (any, error)
	// ready says why the registry cannot run it, if so.
	ready(r *Registry) error
}

// parseHandler reads what a row says about its handler; parameters are the names it may be given.
func parseHandler(text string, config json.RawMessage, parameters []string) (handler, []error) {
	kind, rest, ok := strings.Cut(text, ":")
	if !ok {
		return nil, []error{fmt.Errorf("handler: %q must begin with builtin:, sql:, http:, mcp: or flow:", text)}
	}
	rest = strings.TrimSpace(rest)
	switch kind {
	case "builtin":
		return parseBuiltin(rest, config)
	case "sql":
		return parseSQL(rest, config, parameters)
	case "http":
		return parseHTTP(rest, config, parameters)
	case "mcp":
		return parseMCP(rest, config)
	case "flow":
		return parseFlow(rest, config)
	}
	return nil, []error{fmt.Errorf("handler: %q is not a kind of handler; use builtin:, sql:, http:, mcp: or flow:", kind)}
}

// decodeConfig reads config into to and refuses fields that to does not have.
func decodeConfig(config json.RawMessage, to any) error {
	if len(config) == 0 {
		return nil
	}
	d := json.NewDecoder(bytes.NewReader(config))
	d.DisallowUnknownFields()
	if err := d.Decode(to); err != nil && !errors.Is(err, io.EOF) {
		if te, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
			return fmt.Errorf("config.%s: must be a %s, not a %s", te.Field, te.Type, te.Value)
		}
		return fmt.Errorf("config: %s", strings.TrimPrefix(err.Error(), "json: "))
	}
	return nil
}

type builtinHandler struct{ name string }

func parseBuiltin(name string, config json.RawMessage) (handler, []error) {
	if !namePattern.MatchString(name) {
		return nil, []error{fmt.Errorf("handler: builtin:%s must name a builtin with 1 to 64 of the characters a-z A-Z 0-9 _ -", name)}
	}
	var own map[string]any // a builtin reads it
	if err := decodeConfig(config, &own); err != nil {
		return nil, []error{err}
	}
	return builtinHandler{name: name}, nil
}

func (h builtinHandler) ready(r *Registry) error {
	if r.builtins[h.name] == nil {
		return fmt.Errorf("this program has no builtin %q", h.name)
	}
	return nil
}

func (h builtinHandler) call(ctx context.Context, r *Registry, c Call, _ map[string]any) (any, error) {
	return r.builtins[h.name](ctx, c)
}
