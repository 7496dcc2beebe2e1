package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/databases"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/migrations"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/models/modelcheck"
	"github.com/lanekeeper/lanekeeper/monitor"
)

// finding is the result of one check.
type finding struct {
	Check  string `json:"check"`
	OK     bool   `json:"ok"`
	Warn   bool   `json:"warn"` // the setup is right, but somebody should look at the detail
	Detail string `json:"detail"`
}

// warning is the error of a check that is OK but has a warning.
type warning struct{ error }

// maxDueAge is how long a run of an automation may be due before doctor warns.
const maxDueAge = 10 * time.Minute

// maxUncountedAge is how old an uncounted row of the activity log may be before doctor warns.
const maxUncountedAge = 10 * time.Minute

// verdictCheck is the check of the agent's work. A failing skill is no fault of the installation.
const verdictCheck = "verdict"

// sign returns the mark of a finding in text.
func (f finding) sign() string {
	switch {
	case !f.OK:
		return "BAD "
	case f.Warn, f.Check == verdictCheck && !strings.HasPrefix(f.Detail, monitor.Working):
		return "WARN"
	}
	return "ok  "
}

func (c *cli) doctorCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Check the setup and suggest fixes",
		Long:  "Check configuration, database, schema, workers and model. The exit code is 1 when a check is BAD.",
		Args:  positionalArgs(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			found := c.diagnose(cmd.Context())
			err := c.print(pageOf(found, ""), func(w io.Writer) {
				for _, f := range found {
					fmt.Fprintf(w, "%s %-14s %s\n", f.sign(), f.Check,
						strings.ReplaceAll(f.Detail, "\n", "\n"+strings.Repeat(" ", 20)))
				}
			})
			if err != nil {
				return err
			}
			for _, f := range found {
				if !f.OK {
					return &exitError{exitFailed, nil}
				}
			}
			return nil
		},
	}
}

// diagnose runs the checks. A failed check skips those that need its result.
func (c *cli) diagnose(ctx context.Context) []finding {
	var found []finding
	add := func(check string, err error, detail string) bool {
		if err != nil {
			detail = err.Error()
		}
		_, warn := errors.AsType[warning](err)
		found = append(found, finding{check, err == nil || warn, warn, detail})
		return err == nil || warn
	}
	if err := c.loadDevDotEnv(); err != nil {
		add("configuration", err, "")
		return found
	}
	c.quietLogs()
	cfg, log, err := c.settings()
	if !add("configuration", err, "all settings are valid") {
		return found
	}
	if !cfg.DatabaseURL.IsSet() {
		binaries, err := pgserver.FindBinaries(func(name string) string { return c.environ[name] })
		add("server", err, fmt.Sprintf("PostgreSQL %s in %s", binaries.Version, binaries.Dir))
	}
	s, err := c.openSession(ctx, cfg, log)
	if add("database", err, "reachable") {
		defer s.close(ctx)
		c.diagnoseDatabase(ctx, s, add)
	}
	c.diagnoseModel(ctx, cfg, log, add)
	return found
}

// diagnoseDatabase bounds each check's wait for a lock, and names the session that locks the table.
func (c *cli) diagnoseDatabase(ctx context.Context, open *session, report func(string, error, string) bool) {
	s, err := open.prompt(ctx)
	if err != nil {
		report("PostgreSQL", err, "")
		return
	}
	defer s.Pool.Close()
	add := func(check string, err error, detail string) bool {
		if postgres.Locked(err) {
			err = lockedTables(ctx, s.Pool, err)
		}
		return report(check, err, detail)
	}
	var version, isolation string
	err = s.Pool.QueryRow(ctx, `select current_setting('server_version'),
		current_setting('default_transaction_isolation')`).
		Scan(&version, &isolation)
	add("PostgreSQL", err, version+", "+isolation)
	err = migrations.Check(ctx, s.Pool)
	if err == nil {
		err = migrations.CheckObjects(ctx, s.Pool)
	}
	if !add("schema", err, fmt.Sprintf("version %d", migrations.Version())) {
		return
	}
	if add("rights", migrations.Rights(ctx, s.Pool), "owner of the tables, with write access") {
		durability, err := tryCommit(ctx, s.Pool)
		add("commits", err, durability)
	}
	if err := migrations.CheckCreators(ctx, s.Pool); err != nil {
		add("schema rights", warning{err}, "")
	}
	if err := migrations.CheckClient(ctx, s.Pool); err != nil {
		add("client role", warning{err}, "")
	}
	diagnoseWork(ctx, s, add)
	diagnosePause(ctx, s, add)
	diagnoseAutomations(ctx, s, add)
	diagnoseCounts(ctx, s, add)
	judge := monitor.Monitor{Agents: app.NewDirectory(s.config), Limits: app.Limits(s.config.Limits)}
	status, err := judge.Status(ctx, s.Pool)
	add(verdictCheck, err, verdictText(status))
	if list, err := judge.Agents.List(ctx, s.Pool); err == nil {
		if free := app.FreeAnswers(s.config, list); len(free) > 0 {
			add("prices", hint(fmt.Errorf("the price of %s has no output, so its answers cost nothing",
				strings.Join(free, ", ")), "add output to AGENT_PRICES"), "")
		}
	}
	diagnoseReplica(ctx, s, add)
	diagnoseChannels(ctx, s, add)
	c.diagnoseNamed(ctx, s, add)
	diagnoseEmbedding(ctx, s, add)
}

// diagnoseWork reports processes, and executions that none runs.
func diagnoseWork(ctx context.Context, s *session, add func(string, error, string) bool) {
	var workers, stuck int
	var pending bool
	err := s.Pool.QueryRow(ctx, `
		select (select count(*) from agent_workers where kind = 'process' and expires_at > clock_timestamp()),
		       (select count(*) from agent_executions_stuck),
		       exists (select from agent_executions where status = 'pending' and not is_external)`).
		Scan(&workers, &stuck, &pending)
	switch {
	case err != nil || workers > 0:
		add("workers", err, fmt.Sprintf("%d alive", workers))
	case pending:
		add("workers", warning{errors.New("executions are pending and no process is alive; start `agent serve`")}, "")
	default:
		add("workers", nil, "none alive: only `agent heartbeat` runs heartbeats; start `agent serve` or `agent dev`")
	}
	if err == nil && stuck > 0 {
		err = fmt.Errorf("%d %s stuck; check that `agent serve` runs", stuck, plural("execution", stuck))
	}
	add("executions", err, "none stuck")
}

// diagnosePause reports what stops autonomous work.
func diagnosePause(ctx context.Context, s *session, add func(string, error, string) bool) {
	pause, err := executions.CurrentPause(ctx, s.Pool)
	autonomy := "not paused"
	if pause.Paused {
		autonomy = pause.String() + "; `agent resume` ends it"
	} else if err == nil {
		var holder *int
		err = s.Pool.QueryRow(ctx, `select lanekeeper.agent_pause_lock_holder()`).Scan(&holder)
		if holder != nil {
			autonomy = fmt.Sprintf("held back by the session with pid %[1]d, which holds the lock of a pause: "+
				"end its transaction, or the session: select pg_terminate_backend(%[1]d)", *holder)
		}
	}
	add("autonomy", err, autonomy)
}

// diagnoseAutomations warns of runs that are due for long.
func diagnoseAutomations(ctx context.Context, s *session, add func(string, error, string) bool) {
	due, err := automations.LongestDue(ctx, s.Pool)
	switch {
	case errors.Is(err, automations.ErrNotFound):
		err = nil
	case err == nil && time.Since(*due.OldestDueAt) > maxDueAge:
		err = warning{fmt.Errorf("%s: %s %s due, the oldest since %s; the runs of an automation are serial; "+
			"see `agent automations ls`", printable(due.Name), dueCount(due.RunsDue), plural("run", int(due.RunsDue)),
			formatTime(*due.OldestDueAt))}
	}
	add("automations", err, fmt.Sprintf("no run has been due for more than %s", human.Duration(maxDueAge)))
}

// diagnoseCounts warns if a process has run for long and the activity log has old uncounted rows.
func diagnoseCounts(ctx context.Context, s *session, add func(string, error, string) bool) {
	var oldest time.Time
	err := s.Pool.QueryRow(ctx, `
		select a.created_at
		  from agent_activity a
		 where a.id >= (select c.counted_upto from agent_activity_counted c)
		   and a.id < lanekeeper.agent_uuid7_floor(now() - @age::interval)
		   and exists (select from agent_workers w
		                where w.kind = 'process' and w.expires_at > clock_timestamp() and w.started_at < now() - @age::interval)
		 order by a.id limit 1`, postgres.Strict{"age": maxUncountedAge}).Scan(&oldest)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		err = nil
	case err == nil:
		err = warning{fmt.Errorf("the activity log is not counted since %s, so reports get slower; "+
			"see \"rows not counted\" in the log of `agent serve`, and end transactions as old as that", formatTime(oldest))}
	}
	add("counts", err, fmt.Sprintf("no activity is uncounted for more than %s", human.Duration(maxUncountedAge)))
}

// verdictText returns the verdict, with the newest error of each failing subject.
func verdictText(s monitor.Status) string {
	lines := []string{s.String()}
	for _, g := range s.Failing {
		names := make([]string, len(g.Named()))
		for i, subject := range g.Named() {
			names[i] = subject.Kind + " " + subject.Name
		}
		lines = append(lines, fmt.Sprintf("%s: %s", strings.Join(names, ", "), printable(truncate(g.Message, 200))))
	}
	return strings.Join(lines, "\n")
}

// commitTimeout bounds a commit that is tried.
const commitTimeout = 5 * time.Second

// tryCommit tries a large write, and commits a record that changes no row. It returns what a commit of the server waits
// for.
func tryCommit(ctx context.Context, pool *pgxpool.Pool) (durability string, err error) {
	if err := api.TryWrite(ctx, pool); err != nil {
		return "", withAdvice(err)
	}
	limited, cancel := context.WithTimeout(ctx, commitTimeout)
	defer cancel()
	_, err = pool.Exec(limited, `select pg_logical_emit_message(true, 'lanekeeper', 'doctor')`)
	if err != nil && (limited.Err() == nil || ctx.Err() != nil) {
		return "", err
	}
	var fsync, mode, standbys string
	failed := pool.QueryRow(ctx, `select current_setting('fsync'), current_setting('synchronous_commit'),
		current_setting('synchronous_standby_names')`).Scan(&fsync, &mode, &standbys)
	switch {
	case failed != nil:
		return "", fmt.Errorf("read the settings of commits: %w", failed)
	case err != nil && standbys != "":
		return "", hint(fmt.Errorf("a commit is not finished after %s", commitTimeout), "check that the standbys of "+
			"synchronous_standby_names (%s) are connected: select * from pg_stat_replication", standbys)
	case err != nil:
		return "", hint(fmt.Errorf("a commit is not finished after %s", commitTimeout),
			"check the disk of PostgreSQL's log (pg_wal)")
	case fsync == "off" || mode == "off":
		return fmt.Sprintf("do not wait for the disk: fsync is %s, synchronous_commit is %s", fsync, mode), nil
	case mode == "local":
		return "reach the disk, and do not wait for standbys: synchronous_commit is local", nil
	}
	return "reach the disk, and the synchronous standbys if there are any", nil
}

// lockedTables replaces err by the sessions that lock tables against readers. Without one it returns err.
func lockedTables(ctx context.Context, pool *pgxpool.Pool, err error) error {
	var locks string
	failed := pool.QueryRow(ctx, `
		select coalesce(string_agg(
		         format('session %s (%s, %s, its transaction is open for %s s) locks %s',
		                a.pid,
		                coalesce(nullif(a.application_name, ''), 'no name'),
		                coalesce(a.state, 'role ' || a.usename),
		                coalesce(floor(extract(epoch from clock_timestamp() - a.xact_start))::text, '?'),
		                l.relation::regclass),
		         '; '), '')
		  from pg_locks l
		  join pg_stat_activity a on a.pid = l.pid
		 where l.granted
		   and l.locktype = 'relation'
		   and l.mode = 'AccessExclusiveLock'
		   and l.relation in (select c.oid from pg_class c where c.relkind in ('r', 'p') and c.relname ~ '^(agent|river)_')
		   and l.database = (select d.oid from pg_database d where d.datname = current_database())`).Scan(&locks)
	if failed != nil {
		return errors.Join(err, failed)
	}
	if locks == "" {
		return err
	}
	return hint(errors.New(locks), "it ends with its transaction, or by pg_terminate_backend")
}

// diagnoseChannels reports channels that do not work.
func diagnoseChannels(ctx context.Context, s *session, add func(string, error, string) bool) {
	all, err := channels.List(ctx, s.Pool)
	var wrong []error
	maybe, failed := 0, 0
	for _, x := range all {
		switch {
		case !x.Enabled:
		case x.State == "failing":
			wrong = append(wrong, fmt.Errorf("%s is failing: %s", x.Name, printable(x.Error)))
		case x.Deaf:
			wrong = append(wrong, fmt.Errorf("%s is deaf: %s has not answered since %s; check that `agent serve` runs", x.Name,
				x.Type, formatTime(*x.SeenAt)))
		}
		maybe, failed = maybe+x.MaybeSent, failed+x.Failed
	}
	detail := fmt.Sprintf("%d, none failing", len(all))
	if maybe+failed > 0 {
		detail += fmt.Sprintf("; %d %s maybe sent and %d given up in 30 days, see `agent channels sends`",
			maybe, plural("message", maybe), failed)
	}
	add("channels", errors.Join(err, errors.Join(wrong...)), detail)
}

// diagnoseNamed connects to each named database, as calls of sql: skills do.
func (c *cli) diagnoseNamed(ctx context.Context, s *session, add func(string, error, string) bool) {
	all, err := databases.List(ctx, s.Pool)
	if err != nil {
		add("databases", err, "")
		return
	}
	named := c.namedDatabases(s)
	defer named.Close()
	for _, d := range all {
		limited, cancel := context.WithTimeout(ctx, 15*time.Second)
		on, err := named.Reach(limited, d)
		if err == nil {
			err = on.Check(limited)
		}
		cancel()
		add("database "+d.Name, err, fmt.Sprintf("reachable by %s, access: %s", d.URLEnv, d.Access))
	}
}

func (c *cli) diagnoseModel(
	ctx context.Context, cfg config.Config, log *slog.Logger, add func(string, error, string) bool,
) {
	model, about, stop, err := app.NewModel(ctx, cfg, log, models.Retry{Attempts: 1})
	if !add("model", err, about) {
		return
	}
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	answers, tools := modelcheck.Once(ctx, model, modelcheck.Target{Model: model.Model()})
	if add("model answers", failureOf(answers), "yes") {
		add("model tools", failureOf(tools), "works; `agent models check` tests more")
	}
}

// failureOf returns the error of a model check, with the setting that helps.
func failureOf(r modelcheck.Result) error {
	switch {
	case r.Status != modelcheck.Fail:
		return nil
	case r.Help == "":
		return errors.New(r.Detail)
	}
	return hint(errors.New(r.Detail), "%s", r.Help)
}

func diagnoseReplica(ctx context.Context, s *session, add func(string, error, string) bool) {
	if !s.Read.Configured() {
		return
	}
	behind, err := s.Read.Measure(ctx)
	if err != nil {
		err = replicaError(err)
	}
	add("replica", err, fmt.Sprintf("a standby of this database, %.1f s behind", behind.Seconds()))
}

// diagnoseEmbedding checks semantic search of memories.
func diagnoseEmbedding(ctx context.Context, s *session, add func(string, error, string) bool) {
	const check = "embeddings"
	index, err := app.NewIndex(s.config, s.log)
	if err != nil || index == nil {
		add(check, err, "off: memory search matches words only; set AGENT_EMBEDDING_MODEL to enable them")
		return
	}
	state, err := index.State(ctx, s.Pool)
	if err == nil && state.Extension == "" {
		err = missingExtension(s.config.Embedding.Model, state)
	}
	if err != nil {
		add(check, err, "")
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	dimensions, err := index.Check(ctx)
	if err != nil {
		err = fmt.Errorf("memory search matches words only: %w", err)
	}
	add(check, err, fmt.Sprintf("%s, %d dimensions, pgvector %s; %d of %d memories are embedded",
		s.config.Embedding.Model, dimensions, state.Extension, state.Embedded, state.Entries))
}

// missingExtension explains how to install the extension vector.
func missingExtension(model string, state memory.EmbeddingState) error {
	wrong := fmt.Sprintf(
		"%s is set, but memory search matches words only: the database has no extension vector (pgvector)", model)
	if state.Available {
		return hint(errors.New(wrong), "run as a superuser: create extension vector;")
	}
	return hint(errors.New(wrong), "install pgvector on its server (a package such as postgresql-%d-pgvector), then run "+
		"in the database as a superuser: create extension vector;",
		state.Server)
}
