package flows_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/requests"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Candidate is what the flow is started with.
type Candidate struct {
	Name string `json:"name"`
}

// Verdict is what the child decides.
type Verdict struct {
	Fit bool `json:"fit"`
}

// Onboard is a flow in Go: a durable function. It is called from the top each time its execution is claimed; what is
// recorded is not done again.
func Onboard(ctx context.Context, input json.RawMessage) (executions.Result, error) {
	var who Candidate
	if err := json.Unmarshal(input, &who); err != nil {
		return executions.Result{}, fmt.Errorf("read input: %w", err)
	}
	x, _ := executions.Current(ctx)

	// Step: what may differ from run to run happens inside of one, and its typed result is recorded.
	greeting, err := executions.Step(ctx, "greeting", func(context.Context) (string, error) {
		return "Hola " + who.Name + ". Tienes experiencia?", nil
	})
	if err != nil {
		return executions.Result{}, err
	}

	// Send: once, however often the process dies; in its turn, when another execution has the thread.
	if _, err := threads.Send(ctx, threads.Outgoing{ThreadID: *x.ThreadID, Content: greeting}); err != nil {
		return executions.Result{}, err
	}

	// Wait: parks the execution. Return its error: the function is called again when the answer is there.
	out, err := executions.Wait(ctx, "answer", executions.Response(*x.ThreadID, 24*time.Hour))
	switch {
	case err != nil:
		return executions.Result{}, err
	case out.TimedOut:
		return executions.Result{Summary: "no answer"}, executions.ErrTimedOut
	}
	vars, err := requests.Variables("response", out)
	if err != nil {
		return executions.Result{}, err
	}
	if err := executions.SetVariables(ctx, vars); err != nil {
		return executions.Result{}, err
	}

	// Trigger: a child, and how it ended. It may speak in the thread while its parent waits for it.
	child, err := executions.Trigger(ctx, "evaluation", executions.Child{Flow: "evaluate", Input: vars, Wait: true})
	if err != nil {
		return executions.Result{}, err
	}
	if !child.Success { // its failure is its parent's to handle
		return executions.Result{}, fmt.Errorf("evaluate %s: %s", who.Name, child.Error)
	}
	var verdict Verdict
	if err := json.Unmarshal(child.Result, &verdict); err != nil {
		return executions.Result{}, fmt.Errorf("read verdict: %w", err)
	}
	return executions.Result{Summary: "onboarded " + who.Name, Value: verdict}, nil
}

// Evaluate is the child.
func Evaluate(_ context.Context, input json.RawMessage) (executions.Result, error) {
	var said struct {
		LastResponse string `json:"lastResponse"`
	}
	if err := json.Unmarshal(input, &said); err != nil {
		return executions.Result{}, fmt.Errorf("read input: %w", err)
	}
	return executions.Result{Summary: "evaluated", Value: Verdict{Fit: said.LastResponse == "si"}}, nil
}

// A flow in Go is registered under its name, and started like any other.
func Example() {
	on(func(ctx context.Context, pool *pgxpool.Pool, engine *executions.Engine) error {
		if err := errors.Join(engine.Register("onboard", Onboard), engine.Register("evaluate", Evaluate)); err != nil {
			return err
		}
		x, _, err := engine.Start(ctx, pool, executions.Spec{
			Flow: "onboard", Surface: trace.Flow, ThreadID: "maria", Input: Candidate{Name: "María"},
		})
		if err != nil {
			return err
		}
		return running(ctx, engine, func(ctx context.Context) error {
			if err := reach(ctx, pool, x.ID, executions.Waiting); err != nil {
				return err
			}
			// The visitor answers: any client of the database may say so.
			if _, err := pool.Exec(ctx, `select * from lanekeeper.receive_agent_message('maria', 'si')`); err != nil {
				return err
			}
			if err := reach(ctx, pool, x.ID, executions.Completed); err != nil {
				return err
			}
			x, err := executions.Get(ctx, pool, x.ID)
			fmt.Println(x.ResultSummary, string(x.Result))
			return err
		})
	})
	// Output: onboarded María {"fit": true}
}
