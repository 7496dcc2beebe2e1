package mcp

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/skills"
)

const (
	maxRequestBody  = 1 << 20
	refreshInterval = 5 * time.Second // pause between a stdio session's checks for changed offers
	defaultVersion  = "dev"
)

// Server offers skills over MCP. Agents, Version and Logger may be empty; the other fields are required. It is safe for
// concurrent use.
type Server struct {
	Pool   *pgxpool.Pool
	Engine *executions.Engine
	Skills *skills.Registry
	// Invoke calls a skill as a durable step; it is the method of reason.Loop.
	Invoke func(ctx context.Context, step string, s skills.Skill, args json.RawMessage,
		call executions.Call) (json.RawMessage, error)
	Agent   string
	Agents  *agents.Directory // its default agent makes the calls; nil: Agent does
	Version string
	Logger  *slog.Logger

	calls sync.Map // callKey → context.CancelFunc, of this process
}

// serverKey is the context key of a request's server.
type serverKey struct{}

// Handler serves streamable HTTP without stored sessions, so any process can answer any request. It does not
// authenticate; put the admin token in front. A response ends with the request's context.
func (s *Server) Handler() http.Handler {
	stream := sdk.NewStreamableHTTPHandler(func(r *http.Request) *sdk.Server {
		server, _ := r.Context().Value(serverKey{}).(*sdk.Server)
		return server
	}, &sdk.StreamableHTTPOptions{
		Stateless: true, PropagateRequestCancellation: true, MaxRequestBodyBytes: maxRequestBody,
		// The SDK's protection rejects foreign Host headers on loopback, which a local proxy may forward. The admin token
		// keeps other sites out: browsers never send it automatically.
		DisableLocalhostProtection: true,
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		server, err := s.server(r.Context(), false)
		if err == nil {
			_, err = s.refresh(r.Context(), server, nil)
		}
		if err != nil {
			s.log().ErrorContext(r.Context(), "offered skills not read", "error", err)
			http.Error(w, "the offered skills cannot be read now", http.StatusServiceUnavailable)
			return
		}
		r = s.identify(w, r)
		stream.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), serverKey{}, server)))
	})
}

// Serve serves one client over in and out, one message per line. It returns nil when the client leaves or ctx ends. It
// answers an invalid line, or a line over 1 MiB, with an error. It notifies the client of changed offers. No other code
// may write to out.
func (s *Server) Serve(ctx context.Context, in io.ReadCloser, out io.WriteCloser) error {
	ctx, cancel := context.WithCancel(ctx)
	server, err := s.server(ctx, true)
	var revisions map[string]int
	if err == nil {
		revisions, err = s.refresh(ctx, server, nil)
	}
	if err != nil {
		cancel()
		return err
	}
	var wg sync.WaitGroup
	wg.Go(func() { s.watchOffers(ctx, server, revisions) })
	writer := &serializedWriter{WriteCloser: out}
	lines := &clientLines{out: writer, maxBytes: maxRequestBody}
	reader := &lineReader{Closer: in, in: bufio.NewReader(in), maxBytes: maxRequestBody, accept: lines.accept}
	err = server.Run(ctx, &sdk.IOTransport{Reader: reader, Writer: writer, MaxLineLength: maxRequestBody})
	if ctx.Err() != nil || clientLeft(err) {
		err = nil
	}
	cancel()
	wg.Wait()
	if err != nil {
		return fmt.Errorf("serve MCP: %w", err)
	}
	return nil
}

// clientLeft reports the normal ends of a stdio session.
func clientLeft(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrClosedPipe) || errors.Is(err, sdk.ErrConnectionClosed)
}

// watchOffers keeps a session's list of tools current until ctx ends.
func (s *Server) watchOffers(ctx context.Context, server *sdk.Server, revisions map[string]int) {
	ticker := time.NewTicker(refreshInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		current, err := s.refresh(ctx, server, revisions)
		if err != nil {
			s.log().WarnContext(ctx, "offered skills not read", "error", err)
			continue
		}
		revisions = current
	}
}

// server returns an SDK server without tools. changes makes it announce changes of the list.
func (s *Server) server(ctx context.Context, changes bool) (*sdk.Server, error) {
	agentName, err := s.agentName(ctx)
	if err != nil {
		return nil, err
	}
	return sdk.NewServer(&sdk.Implementation{Name: "lanekeeper", Version: cmp.Or(s.Version, defaultVersion)},
		&sdk.ServerOptions{
			Instructions: "Tools are skills of the agent " + agentName + ". A tool that needs an admin's approval " +
				"answers with the id of the approval; call it again with the same arguments after the approval.",
			Capabilities: &sdk.ServerCapabilities{Tools: &sdk.ToolCapabilities{ListChanged: changes}},
			PageSize:     1000,
			SetCacheable: func(_ context.Context, _ sdk.Request, c *sdk.Cacheable) { c.CacheScope = "private" },
		}), nil
}

// agentName returns the name of the agent that makes the calls.
func (s *Server) agentName(ctx context.Context) (string, error) {
	if s.Agents == nil {
		return s.Agent, nil
	}
	agent, err := s.Agents.Default(ctx, s.Pool)
	return agent.Name, err
}

// refresh applies the current offers to a server. before has the revisions that the server offers; refresh returns the
// new revisions.
func (s *Server) refresh(ctx context.Context, server *sdk.Server, before map[string]int) (map[string]int, error) {
	offered, err := s.offeredSkills(ctx)
	if err != nil {
		return before, err
	}
	current := make(map[string]int, len(offered))
	for _, skill := range offered {
		revision, ok := before[skill.Name]
		if ok && revision == skill.Revision || s.addTool(ctx, server, skill) {
			current[skill.Name] = skill.Revision
		}
	}
	for name := range before {
		if _, exists := current[name]; !exists {
			server.RemoveTools(name)
		}
	}
	return current, nil
}

// addTool offers one skill. It returns false if the SDK panics on the schema.
func (s *Server) addTool(ctx context.Context, server *sdk.Server, skill skills.Skill) (added bool) {
	defer func() {
		if reason := recover(); reason != nil {
			s.log().WarnContext(ctx, "skill cannot be offered over MCP", "skill", skill.Name, "reason", fmt.Sprint(reason))
		}
	}()
	description := skill.Description
	if skill.Trust == skills.TrustApprove {
		description += " (An admin must approve each call.)"
	}
	server.AddTool(&sdk.Tool{
		Name: skill.Name, Description: description, InputSchema: skill.Parameters(),
		Annotations: &sdk.ToolAnnotations{IdempotentHint: skill.Idempotent},
	}, func(ctx context.Context, request *sdk.CallToolRequest) (*sdk.CallToolResult, error) {
		ctx, end := s.cancellable(ctx)
		defer end()
		return s.callTool(ctx, skill.Name, request.Params.Arguments)
	})
	return true
}

func (s *Server) log() *slog.Logger { return cmp.Or(s.Logger, slog.New(slog.DiscardHandler)) }
