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

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/skills"
)

const (
	maxBody    = 1 << 20
	lookAgain  = 5 * time.Second // how often a session over stdio looks whether other skills are offered
	ourVersion = "dev"
)

// Server offers skills over MCP. All fields but Version and Logger are required. It may be used from many goroutines.
type Server struct {
	Pool   *pgxpool.Pool
	Engine *executions.Engine
	Skills *skills.Registry
	// Invoke calls a skill as a durable step; it is reason.Loop's.
	Invoke  func(ctx context.Context, step string, s skills.Skill, args json.RawMessage, call executions.Call) (json.RawMessage, error)
	Agent   string
	Version string
	Logger  *slog.Logger
}

// serverKey is where a request's server is kept on its way through the SDK.
type serverKey struct{}

// Handler answers streamable HTTP, without sessions: every request stands alone, so any process may answer it. It
// checks nothing about who asks; put the admin token before it. It ends with the request's context.
func (s *Server) Handler() http.Handler {
	stream := sdk.NewStreamableHTTPHandler(func(r *http.Request) *sdk.Server {
		server, _ := r.Context().Value(serverKey{}).(*sdk.Server)
		return server
	}, &sdk.StreamableHTTPOptions{
		Stateless: true, PropagateRequestCancellation: true, MaxRequestBodyBytes: maxBody,
		// The token, which no browser sends by itself, is what keeps other sites out; a proxy on this machine may pass on any host.
		DisableLocalhostProtection: true,
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		server := s.server(false)
		if _, err := s.refresh(r.Context(), server, nil); err != nil {
			s.log().ErrorContext(r.Context(), "offered skills not read", "error", err)
			http.Error(w, "the offered skills cannot be read now", http.StatusServiceUnavailable)
			return
		}
		stream.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), serverKey{}, server)))
	})
}

// Serve answers one client over in and out, a message a line, until the client leaves or ctx ends, which is no error.
// A line that is no message, or has more than 1 MiB, is answered with an error and passed over. The client is told when other skills
// are offered. Nothing else may write to out.
func (s *Server) Serve(ctx context.Context, in io.ReadCloser, out io.WriteCloser) error {
	ctx, cancel := context.WithCancel(ctx)
	server := s.server(true)
	known, err := s.refresh(ctx, server, nil)
	if err != nil {
		cancel()
		return err
	}
	var under sync.WaitGroup
	under.Go(func() { s.follow(ctx, server, known) })
	shared := &oneByOne{WriteCloser: out}
	asked := &lines{Closer: in, in: bufio.NewReader(in), out: shared, most: maxBody}
	err = server.Run(ctx, &sdk.IOTransport{Reader: asked, Writer: shared, MaxLineLength: maxBody})
	if ctx.Err() != nil || clientLeft(err) {
		err = nil
	}
	cancel()
	under.Wait()
	if err != nil {
		return fmt.Errorf("serve MCP: %w", err)
	}
	return nil
}

// clientLeft reports the ways in which a session over stdio ends well.
func clientLeft(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrClosedPipe) || errors.Is(err, sdk.ErrConnectionClosed)
}

// follow keeps a long session's list of tools true until ctx ends.
func (s *Server) follow(ctx context.Context, server *sdk.Server, known map[string]int) {
	ticker := time.NewTicker(lookAgain)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		now, err := s.refresh(ctx, server, known)
		if err != nil {
			s.log().WarnContext(ctx, "offered skills not read", "error", err)
			continue
		}
		known = now
	}
}

// server is an SDK server without tools. changes says whether it tells its client of other tools.
func (s *Server) server(changes bool) *sdk.Server {
	return sdk.NewServer(&sdk.Implementation{Name: "lanekeeper", Version: cmp.Or(s.Version, ourVersion)}, &sdk.ServerOptions{
		Instructions: "Tools are skills of the agent " + s.Agent + ". A tool that needs an admin's approval answers with the id of " +
			"the approval; call it again with the same arguments when it was given.",
		Capabilities: &sdk.ServerCapabilities{Tools: &sdk.ToolCapabilities{ListChanged: changes}},
		PageSize:     1000,
	})
}

// refresh makes a server offer what is offered now. known are the revisions of what it offers; the new ones are returned.
func (s *Server) refresh(ctx context.Context, server *sdk.Server, known map[string]int) (map[string]int, error) {
	all, err := s.offered(ctx)
	if err != nil {
		return known, err
	}
	now := make(map[string]int, len(all))
	for _, skill := range all {
		revision, ok := known[skill.Name]
		if ok && revision == skill.Revision || s.add(ctx, server, skill) {
			now[skill.Name] = skill.Revision
		}
	}
	for name := range known {
		if _, still := now[name]; !still {
			server.RemoveTools(name)
		}
	}
	return now, nil
}

// add offers one skill; false when the SDK does not take its schema, which it says with a panic.
func (s *Server) add(ctx context.Context, server *sdk.Server, skill skills.Skill) (added bool) {
	defer func() {
		if reason := recover(); reason != nil {
			s.log().WarnContext(ctx, "skill cannot be offered over MCP", "skill", skill.Name, "reason", fmt.Sprint(reason))
		}
	}()
	about := skill.Description
	if skill.Trust == skills.TrustApprove {
		about += " (An admin must approve each call.)"
	}
	server.AddTool(&sdk.Tool{
		Name: skill.Name, Description: about, InputSchema: skill.Parameters(),
		Annotations: &sdk.ToolAnnotations{IdempotentHint: skill.Idempotent},
	}, func(ctx context.Context, request *sdk.CallToolRequest) (*sdk.CallToolResult, error) {
		return s.call(ctx, skill.Name, request.Params.Arguments)
	})
	return true
}

func (s *Server) log() *slog.Logger {
	if s.Logger == nil {
		return slog.New(slog.DiscardHandler)
	}
	return s.Logger
}
