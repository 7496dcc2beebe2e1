package mcp

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

const (
	maxRequestBody  = 1 << 20
	refreshInterval = 5 * time.Second // pause between a stdio session's checks for changed offers
	defaultVersion  = "dev"
)

// Server offers skills over MCP. All fields but Version and Logger are required. It is safe for concurrent use.
type Server struct {
	Pool   *pgxpool.Pool
	Engine *executions.Engine
	Skills *skills.Registry
	// Invoke calls a skill as a durable step; it is the method of reason.Loop.
	Invoke func(ctx context.Context, step string, s skills.Skill, args json.RawMessage,
		callTool executions.Call) (json.RawMessage, error)
	Agent   string
	Agents  *agents.Directory // the default agent makes the calls; nil: Agent
	Version string
	Logger  *slog.Logger
}

// serverKey is the context key of a request's server.
type serverKey struct{}

// Handler serves streamable HTTP without sessions, so any process can answer any request. It does not authenticate; put
// the admin token in front. A response ends with the request's context.
func (s *Server) Handler() http.Handler {
	stream := sdk.NewStreamableHTTPHandler(func(r *http.Request) *sdk.Server {
		server, _ := r.Context().Value(serverKey{}).(*sdk.Server)
		return server
	}, &sdk.StreamableHTTPOptions{
		Stateless: true, PropagateRequestCancellation: true, MaxRequestBodyBytes: maxRequestBody,
		// The token keeps other sites out, because browsers never send it automatically. A local proxy may forward any host.
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
	reader := &lineReader{Closer: in, in: bufio.NewReader(in), out: writer, maxBytes: maxRequestBody}
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

// refresh applies the current offers to a server. known has the revisions that the server offers now; refresh returns
// the new revisions.
func (s *Server) refresh(ctx context.Context, server *sdk.Server, revisions map[string]int) (map[string]int, error) {
	offered, err := s.offeredSkills(ctx)
	if err != nil {
		return revisions, err
	}
	current := make(map[string]int, len(offered))
	for _, skill := range offered {
		revision, ok := revisions[skill.Name]
		if ok && revision == skill.Revision || s.addTool(ctx, server, skill) {
			current[skill.Name] = skill.Revision
		}
	}
	for name := range revisions {
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
		return s.callTool(ctx, skill.Name, request.Params.Arguments)
	})
	return true
}

func (s *Server) log() *slog.Logger {
	if s.Logger == nil {
		return slog.New(slog.DiscardHandler)
	}
	return s.Logger
}

// Flow is the flow of an external call.
const Flow = "mcp.call"

const (
	// answerTTL is how long the caller can collect the answer to an approved call. Later, the same call is a new call.
	answerTTL        = 24 * time.Hour
	callPollInterval = 100 * time.Millisecond
)

// callInput is the input of the flow.
type callInput struct {
	Skill string          `json:"skill"`
	Args  json.RawMessage `json:"args"`
}

// Register registers the flow with the engine, so any process can resume a call after a crash or an approval.
func (s *Server) Register() error {
	s.Engine.Unforkable(Flow, "a call answers one client; call the tool again")
	return s.Engine.Register(Flow, func(ctx context.Context, input json.RawMessage) (executions.Result, error) {
		var in callInput
		if err := json.Unmarshal(input, &in); err != nil {
			return executions.Result{}, fmt.Errorf("read input: %w", err)
		}
		skill, err := executions.Step(ctx, "skill", func(ctx context.Context) (skills.Skill, error) {
			return skills.Get(ctx, s.Pool, in.Skill)
		})
		if err != nil {
			return executions.Result{}, err
		}
		step, call := "skill "+skill.Name, executions.Call{Entry: activity.Entry{Purpose: "called over MCP"}}
		if skill.Trust == skills.TrustApprove {
			id, err := requestApproval(ctx, skill, in.Args)
			if err != nil {
				return executions.Result{}, err
			}
			step, call.OnIntent = approvals.Grant(ctx, id)
		}
		value, err := s.Invoke(ctx, step, skill, in.Args, call)
		if approvals.IsUsed(err) {
			err = errors.New("the approval has expired, or the skill has changed since it was given")
		}
		if err != nil {
			return executions.Result{}, err
		}
		return executions.Result{Summary: "called " + skill.Name, Value: value}, nil
	})
}

// requestApproval requests an approval and waits durably for the decision. The error explains a missing approval.
func requestApproval(ctx context.Context, skill skills.Skill, args json.RawMessage) (id string, err error) {
	approval, err := approvals.Ask(ctx, approvals.Request{
		Skill: skill.Name, SkillID: skill.ID, Revision: skill.Revision, Args: args, Park: true,
	})
	if err != nil {
		return "", err
	}
	decision, err := approvals.Await(ctx, "decision", approval.ID)
	switch {
	case err != nil:
		return "", err
	case decision.TimedOut:
		return "", fmt.Errorf("nobody decided on approval %s in time: %w", approval.ID, executions.ErrTimedOut)
	case decision.Status != "approved":
		return "", fmt.Errorf("the call was not approved (%s): %s", decision.Status, decision.Reason)
	}
	return approval.ID, nil
}

// callTool answers tools/call. The protocol demands a result for a failure of the skill, so the caller's model can read
// it. An error is an internal failure.
func (s *Server) callTool(ctx context.Context, name string, args json.RawMessage) (*sdk.CallToolResult, error) {
	if len(args) == 0 {
		args = json.RawMessage(`{}`)
	}
	skill, err := skills.Get(ctx, s.Pool, name)
	switch {
	case errors.Is(err, skills.ErrNotFound):
		return failureResult("the skill " + name + " no longer exists"), nil
	case err != nil:
		return nil, s.internalError(ctx, err)
	case !skill.Enabled:
		return failureResult("the skill " + skill.OutOfService()), nil
	}
	if err := s.Skills.Check(skill, args); err != nil {
		return failureResult(err.Error()), nil
	}
	agentName, err := s.agentName(ctx)
	if err != nil {
		return nil, s.internalError(ctx, err)
	}
	var execution executions.Execution
	spec := executions.Spec{Flow: Flow, Surface: trace.Flow, Agent: agentName, Input: callInput{name, args}}
	if skill.Trust == skills.TrustApprove {
		execution, err = s.callWithApproval(ctx, skill, args, spec)
	} else {
		execution, err = s.Engine.RunSync(ctx, spec)
	}
	if errors.Is(err, executions.ErrPaused) {
		return failureResult(err.Error()), nil
	}
	if err != nil {
		return nil, s.internalError(ctx, err)
	}
	return toolResult(execution), nil
}

// internalError logs an internal failure and hides its cause from the caller.
func (s *Server) internalError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	s.log().ErrorContext(ctx, "MCP call not made", "error", err)
	return errors.New("the call failed inside the server; the server's log has the cause")
}

// callWithApproval finds the execution that an earlier try of this call started, or starts an execution. It returns a
// pending execution, or an ended execution whose answer then belongs to this caller alone.
func (s *Server) callWithApproval(
	ctx context.Context, skill skills.Skill, args json.RawMessage, spec executions.Spec,
) (executions.Execution, error) {
	hash, err := approvals.Hash(args)
	if err != nil {
		return executions.Execution{}, err
	}
	for {
		id, err := openCall(ctx, s.Pool, skill, hash)
		if err != nil {
			return executions.Execution{}, err
		}
		spec.DedupeKey = "mcp.call " + id
		execution, err := s.Engine.RunSync(ctx, spec)
		if err != nil {
			return execution, err
		}
		if execution, err = s.awaitSettled(ctx, execution, skill.Timeout()); err != nil || !execution.Status.Ended() {
			return execution, err
		}
		collected, err := collectAnswer(ctx, s.Pool, id)
		if err != nil {
			return execution, err
		}
		expired := execution.CompletedAt != nil && time.Since(*execution.CompletedAt) > answerTTL
		if collected && !expired && execution.Status != executions.Timeout {
			return execution, nil
		}
		// Another caller collected the answer, or it is stale: this is a new call.
	}
}

// awaitSettled waits until an execution ends or waits, but at most a second longer than timeout. Another process may
// run the execution.
func (s *Server) awaitSettled(
	ctx context.Context, execution executions.Execution, timeout time.Duration,
) (executions.Execution, error) {
	deadline := time.Now().Add(timeout + time.Second)
	ticker := time.NewTicker(callPollInterval)
	defer ticker.Stop()
	for !execution.Status.Ended() && execution.Status != executions.Waiting && time.Now().Before(deadline) {
		if execution.ClaimedBy == nil { // it is ready, but no process has claimed it
			if err := s.Engine.ClaimAndRun(ctx, execution.ID); err != nil {
				return execution, err
			}
		}
		var err error
		if execution, err = executions.Get(ctx, s.Pool, execution.ID); err != nil || execution.Status.Ended() ||
			execution.Status == executions.Waiting {
			return execution, err
		}
		select {
		case <-ctx.Done():
			return execution, context.Cause(ctx)
		case <-ticker.C:
		}
	}
	return execution, nil
}

// openCall returns the id of a call's open row. It inserts a missing row.
func openCall(ctx context.Context, db postgres.DB, skill skills.Skill, hash string) (id string, err error) {
	err = db.QueryRow(ctx, `
		insert into agent_mcp_calls as c (skill_name, skill_revision, arguments_hash) values (@skill, @revision, @hash)
		on conflict (skill_name, skill_revision, arguments_hash) where collected_at is null
		do update set skill_name = c.skill_name
		returning id::text`,
		postgres.Strict{"skill": skill.Name, "revision": skill.Revision, "hash": hash}).Scan(&id)
	if err != nil {
		return "", fmt.Errorf("open call of %s: %w", skill.Name, err)
	}
	return id, nil
}

// collectAnswer marks a call's answer as collected. Only one of several callers gets true.
func collectAnswer(ctx context.Context, db postgres.DB, id string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_mcp_calls set collected_at = clock_timestamp() where id = @id and collected_at is null`,
		postgres.Strict{"id": id})
	return postgres.Changed(tag, err, "collect answer")
}

func toolResult(execution executions.Execution) *sdk.CallToolResult {
	var result *sdk.CallToolResult
	switch {
	case execution.Status == executions.Completed:
		result = successResult(execution.Result)
	case execution.Status == executions.Waiting && execution.WaitingFor != nil && *execution.WaitingFor == "approval":
		result = pendingResult(*execution.WaitingKey)
	case !execution.Status.Ended():
		result = failureResult("the call is still running; call again with the same arguments")
	case execution.ErrorMessage != nil:
		result = failureResult(*execution.ErrorMessage)
	default:
		result = failureResult("the call was " + string(execution.Status))
	}
	result.Meta = sdk.Meta{"lanekeeper/trace-id": execution.TraceID, "lanekeeper/execution-id": execution.ID}
	return result
}

// successResult returns the value as text, and as structured content if it is an object.
func successResult(value json.RawMessage) *sdk.CallToolResult {
	var text string
	var fields map[string]json.RawMessage
	result := &sdk.CallToolResult{}
	switch {
	case json.Unmarshal(value, &text) == nil:
	case json.Unmarshal(value, &fields) == nil && fields != nil:
		text, result.StructuredContent = string(value), value
	default:
		text = string(value)
	}
	result.Content = []sdk.Content{&sdk.TextContent{Text: text}}
	return result
}

// pendingResult returns a result for a call that awaits approval. The result is an error, so a caller does not mistake
// the call for done.
func pendingResult(approval string) *sdk.CallToolResult {
	result := failureResult(fmt.Sprintf("Nothing was done yet: the call awaits approval %s. Once an admin has approved it, "+
		"call again with the same arguments.", approval))
	result.StructuredContent = map[string]string{"status": "pending_approval", "approval_id": approval}
	return result
}

// failureResult returns a result with an error message.
func failureResult(text string) *sdk.CallToolResult {
	return &sdk.CallToolResult{IsError: true, Content: []sdk.Content{&sdk.TextContent{Text: text}}}
}

// readResult converts a tool's result to a skill's result: the structured content if present, otherwise the text. It
// summarizes other content by size and kind. The registry bounds the size.
func readResult(t skills.RemoteTool, result *sdk.CallToolResult, redactText func(string) string) (any, error) {
	if len(result.InputRequests) > 0 {
		return nil, &skills.CallError{Class: skills.ClassHandler, Message: fmt.Sprintf(
			"%s/%s asks for input from a person, which this client does not support", t.Server, t.Tool)}
	}
	texts, attachments := splitContent(result.Content)
	text := redactText(strings.Join(texts, "\n"))
	if result.IsError {
		text = cmp.Or(text, "the tool failed and gave no message")
		return nil, &skills.CallError{
			Class:   skills.ClassHandler,
			Message: fmt.Sprintf("%s/%s: %s", t.Server, t.Tool, cleanText(text, 900)),
		}
	}
	switch {
	case result.StructuredContent != nil && len(attachments) == 0:
		return redact.Known(result.StructuredContent, redactText), nil
	case result.StructuredContent != nil:
		return map[string]any{
			"structured": redact.Known(result.StructuredContent, redactText),
			"attached":   redact.Known(attachments, redactText),
		}, nil
	case len(attachments) == 0:
		return text, nil
	case text == "":
		return map[string]any{"attached": redact.Known(attachments, redactText)}, nil
	}
	return map[string]any{"text": text, "attached": redact.Known(attachments, redactText)}, nil
}

// splitContent separates the texts of a result's content and describes the rest.
func splitContent(content []sdk.Content) (texts []string, attachments []any) {
	for _, item := range content {
		switch c := item.(type) {
		case *sdk.TextContent:
			texts = append(texts, c.Text)
		case *sdk.ImageContent:
			attachments = append(attachments, describeBlob("image", c.MIMEType, c.Data))
		case *sdk.AudioContent:
			attachments = append(attachments, describeBlob("audio", c.MIMEType, c.Data))
		case *sdk.ResourceLink:
			attachments = append(attachments, map[string]any{
				"type": "resource_link", "uri": c.URI, "name": cleanText(c.Name, 200), "mime": c.MIMEType,
				"description": cleanText(c.Description, maxSchemaText),
			})
		case *sdk.EmbeddedResource:
			attachments = append(attachments, describeResource(c.Resource))
		default:
			attachments = append(attachments, map[string]any{"type": fmt.Sprintf("%T", item)})
		}
	}
	return texts, attachments
}

// describeResource returns an embedded resource: its text, or a description of its bytes.
func describeResource(r *sdk.ResourceContents) map[string]any {
	if r == nil {
		return map[string]any{"type": "resource"}
	}
	described := map[string]any{"type": "resource", "uri": r.URI, "mime": r.MIMEType, "text": r.Text}
	if len(r.Blob) > 0 {
		described = describeBlob("resource", r.MIMEType, r.Blob)
		described["uri"] = r.URI
	}
	return described
}

// describeBlob describes binary data.
func describeBlob(kind, mime string, data []byte) map[string]any {
	sum := sha256.Sum256(data)
	return map[string]any{"type": kind, "mime": mime, "bytes": len(data), "sha256": hex.EncodeToString(sum[:])}
}

// protocolError returns the message of an error that a reachable server sent. The SDK's own codes, -32003 to -32005,
// mean a lost connection.
func protocolError(err error) (string, bool) {
	e, ok := errors.AsType[*jsonrpc.Error](err)
	if !ok || e.Code <= -32003 && e.Code >= -32005 || errors.Is(err, sdk.ErrConnectionClosed) {
		return "", false
	}
	return fmt.Sprintf("the server refuses the call: %s (%d)", e.Message, e.Code), true
}
