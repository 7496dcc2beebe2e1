package operate

import (
	"cmp"
	"context"
	"errors"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// As lets an agent act in the session from its next turn on; empty leaves that to the session. The error is a problem
// of status 404 for an agent that there is none of.
func (s *Session) As(ctx context.Context, agent string) error {
	if agent == "" {
		return nil
	}
	name := s.o.Agent
	if s.o.Loop.Agents != nil {
		a, err := s.o.Loop.Agents.Find(ctx, s.o.Pool, agent)
		if errors.Is(err, agents.ErrNotFound) {
			return problem.New(http.StatusNotFound, "there is no agent %.60q; see GET /v1/models, or agent agents ls", agent)
		}
		if err != nil {
			return err
		}
		name = a.Name
	} else if agent != name {
		return problem.New(http.StatusNotFound, "there is no agent %.60q", agent)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.agent = name
	return nil
}

// acting is who acts in a session that begins now.
func (s *Session) acting(ctx context.Context) (string, error) {
	s.mu.Lock()
	named := s.agent
	s.mu.Unlock()
	if named != "" || s.o.Loop.Agents == nil {
		return cmp.Or(named, s.o.Agent), nil
	}
	a, err := s.o.Loop.Agents.Default(ctx, s.o.Pool)
	return a.Name, err
}

// pinned is who acts in a session whose thread has an agent. Another one that the admin names is refused. A thread
// whose agent is not in service any more is the default agent's.
func (s *Session) pinned(ctx context.Context, tx pgx.Tx, thread, acting string) (string, error) {
	if thread == acting || s.o.Loop.Agents == nil {
		return acting, nil
	}
	owner, err := s.o.Loop.Agents.Acting(ctx, tx, thread)
	if err != nil {
		return "", err
	}
	s.mu.Lock()
	named := s.agent
	s.mu.Unlock()
	if named != "" && named != owner.Name {
		return "", problem.New(http.StatusConflict, "session %s is one with %s; begin another session for %s", s.id, owner.Name, named)
	}
	return owner.Name, nil
}
