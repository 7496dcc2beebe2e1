package builtins

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

const (
	defaultLimit = 10
	maxLimit     = 50
	maxMatches   = 500       // matches of a search before the filter by category
	maxRecalled  = 128 << 10 // bytes of values in one answer; one entry has at most half of it
	maxGoal      = 400
	maxError     = 300
	maxSkills    = 100
)

// recallArgs select entries; empty ones select the newest.
type recallArgs struct {
	Query    string `json:"query"`
	Category string `json:"category"`
	Limit    int    `json:"limit"`
}

// memoryView is the agent's view of a memory entry.
type memoryView struct {
	Category  string          `json:"category"`
	Key       string          `json:"key"`
	Value     json.RawMessage `json:"value"`
	Revision  int             `json:"revision"`
	ExpiresAt *time.Time      `json:"expires_at,omitempty"`
	UpdatedAt time.Time       `json:"updated_at"`
	TraceID   string          `json:"trace_id"`
}

// memories is the answer of recall.
type memories struct {
	Memories []memoryView `json:"memories"`
	LeftOut  int          `json:"left_out,omitempty"` // found, but beyond the size limit
}

// recallHandler returns the handler of recall.
func recallHandler(index *memory.Index) func(context.Context, postgres.Beginner, memoryUser, recallArgs) (any, error) {
	return func(ctx context.Context, db postgres.Beginner, who memoryUser, args recallArgs) (any, error) {
		found, err := searchMemory(ctx, db, index, who.owner, args)
		if err != nil {
			return nil, err
		}
		result, size := memories{Memories: []memoryView{}}, 0
		for _, e := range found[:min(len(found), postgres.PageSize(args.Limit, defaultLimit, maxLimit))] {
			if size += len(e.Value); size > maxRecalled {
				result.LeftOut++
				continue
			}
			result.Memories = append(result.Memories, memoryView{
				e.Category, e.Key, e.Value, e.Revision, e.ExpiresAt, e.UpdatedAt, e.TraceID,
			})
		}
		return result, nil
	}
}

func searchMemory(
	ctx context.Context, db postgres.DB, index *memory.Index, owner memory.Owner, args recallArgs,
) ([]memory.Entry, error) {
	switch {
	case args.Query == "":
		return owner.Recent(ctx, db, args.Category, postgres.PageSize(args.Limit, defaultLimit, maxLimit))
	case args.Category == "":
		return index.Search(ctx, db, owner, args.Query, postgres.PageSize(args.Limit, defaultLimit, maxLimit))
	}
	found, err := index.Search(ctx, db, owner, args.Query, maxMatches)
	return slices.DeleteFunc(found, func(e memory.Entry) bool { return e.Category != args.Category }), err
}

type objectivesArgs struct {
	Status    string `json:"status"`
	Objective string `json:"objective"`
}

// objectiveView is the agent's view of an objective.
type objectiveView struct {
	ID       string    `json:"id"`
	Name     string    `json:"name"`
	Status   string    `json:"status"`
	Done     int       `json:"done"`
	Failed   int       `json:"failed"`
	Pending  int       `json:"pending"`
	Round    int       `json:"round"`
	Priority int       `json:"priority"`
	DueAt    time.Time `json:"due_at"`
	Goal     string    `json:"goal"`
	Note     string    `json:"note,omitempty"`
	// the note is longer; a query with the objective's name returns all of it
	NoteCut  bool       `json:"note_cut,omitempty"`
	Revision int        `json:"revision"`
	TraceID  string     `json:"last_trace_id"`
	Steps    []stepView `json:"steps,omitempty"` // only for a query with the objective's name
}

// stepView is the agent's view of a step.
type stepView struct {
	Title  string `json:"title"`
	Status string `json:"status"`
	Result string `json:"result,omitempty"`
}

func objectivesList(ctx context.Context, db postgres.DB, args objectivesArgs) (any, error) {
	if args.Objective != "" {
		return oneObjective(ctx, db, args.Objective)
	}
	all, err := objectives.List(ctx, db, objectives.Filter{Status: args.Status, Limit: 100})
	if err != nil {
		return nil, err
	}
	list := make([]objectiveView, len(all))
	for i, o := range all {
		list[i] = objectiveViewOf(o)
		list[i].NoteCut = len(o.Note) > maxGoal
		list[i].Note = textcut.Text(o.Note, maxGoal)
	}
	return map[string]any{"objectives": list}, nil
}

func objectiveViewOf(o objectives.Objective) objectiveView {
	return objectiveView{
		ID: o.ID, Name: o.Name, Status: o.Status, Done: o.Done, Failed: o.Failed, Pending: o.Pending, Round: o.Round,
		Priority: o.Priority,
		DueAt:    o.DueAt, Goal: textcut.Text(o.Goal, maxGoal), Note: o.Note, Revision: o.Revision, TraceID: o.LastTraceID,
	}
}

// oneObjective returns one objective with its steps.
func oneObjective(ctx context.Context, db postgres.DB, name string) (any, error) {
	o, err := objectives.Get(ctx, db, name)
	if err != nil {
		return nil, invalidIf(err, objectives.ErrNotFound)
	}
	steps, err := objectives.Steps(ctx, db, o.ID)
	if err != nil {
		return nil, err
	}
	one := objectiveViewOf(o)
	for _, s := range steps {
		one.Steps = append(one.Steps, stepView{s.Title, s.Status, textcut.Text(s.Result, maxGoal)})
	}
	return map[string]any{"objectives": []objectiveView{one}}, nil
}

type skillsArgs struct {
	Words string `json:"words"`
}

// skillView is the agent's view of a skill.
type skillView struct {
	Name        string `json:"name"`
	Description string `json:"description"`
	Scope       string `json:"scope"`
	Trust       string `json:"trust"`
	Enabled     bool   `json:"enabled"`
}

// skillList lists the skills with all given words in their name or description.
func skillList(ctx context.Context, db postgres.DB, args skillsArgs) (any, error) {
	all, err := skills.List(ctx, db, skills.Filter{Limit: 1000})
	if err != nil {
		return nil, err
	}
	list, omitted := []skillView{}, 0
	for _, s := range all {
		text := strings.ToLower(s.Name + " " + s.Description)
		missing := func(word string) bool { return !strings.Contains(text, word) }
		switch {
		case slices.ContainsFunc(strings.Fields(strings.ToLower(args.Words)), missing):
		case len(list) == maxSkills:
			omitted++
		default:
			list = append(list, skillView{s.Name, textcut.Text(s.Description, maxError), s.Scope, s.Trust, s.Enabled})
		}
	}
	slices.SortFunc(list, func(a, b skillView) int { return strings.Compare(a.Name, b.Name) })
	return map[string]any{"skills": list, "left_out": omitted}, nil
}

type activityArgs struct {
	Skill  string `json:"skill"`
	Status string `json:"status"`
	Limit  int    `json:"limit"`
}

// activityView is the agent's view of an activity: its outcome without its content.
type activityView struct {
	Time       time.Time `json:"time"`
	TraceID    string    `json:"trace_id"`
	Skill      string    `json:"skill"`
	Status     string    `json:"status"`
	DurationMS *int64    `json:"duration_ms"` // null while it runs
	Error      string    `json:"error,omitempty"`
}

func recentActivity(ctx context.Context, db postgres.DB, args activityArgs) (any, error) {
	rows, _, err := activity.Recent(ctx, db, activity.Filter{
		Skill: args.Skill, Status: activity.Status(args.Status), Limit: postgres.PageSize(args.Limit, defaultLimit, maxLimit),
		Kinds:   []activity.Kind{activity.KindCall, activity.KindPhase, activity.KindNote}, // without model calls
		NoEvals: true,
	})
	if err != nil {
		return nil, err
	}
	list := make([]activityView, len(rows))
	for i, r := range rows {
		list[i] = activityView{
			Time: r.CreatedAt, TraceID: r.TraceID, Skill: r.SkillName, Status: string(r.Status),
			DurationMS: r.DurationMS,
		}
		if r.ErrorMessage != nil {
			list[i].Error = textcut.Text(*r.ErrorMessage, maxError)
		}
	}
	return map[string]any{"activities": list}, nil
}

// maxPiece bounds the bytes of a document in one answer.
const maxPiece = 16 << 10

type documentArgs struct {
	Document string `json:"document"`
	Offset   int64  `json:"offset"`
}

// documentView is the agent's view of a document.
type documentView struct {
	ID          string `json:"id"`
	Name        string `json:"name"`
	ContentType string `json:"content_type"`
	Size        int64  `json:"size"`
	IsText      bool   `json:"is_text"`
}

// piece is a part of a document's text.
type piece struct {
	documentView
	Text   string `json:"text"`
	Offset int64  `json:"offset"`
	Next   int64  `json:"next,omitempty"` // offset of the next piece; 0 after the last
	Note   string `json:"note,omitempty"`
}

// documentRead reads a piece of a document, or lists the documents that the run may read.
func documentRead(ctx context.Context, db postgres.DB, args documentArgs) (any, error) {
	span, _ := trace.From(ctx)
	if args.Document == "" {
		list, err := documents.ListReadable(ctx, db, span.ExecutionID, maxLimit)
		if err != nil {
			return nil, err
		}
		views := make([]documentView, len(list))
		for i, d := range list {
			views[i] = documentViewOf(d)
		}
		return map[string]any{"documents": views}, nil
	}
	d, err := documents.GetReadable(ctx, db, span.ExecutionID, args.Document)
	if err != nil {
		return nil, invalidIf(err, documents.ErrNotFound)
	}
	if !d.IsText {
		return piece{documentView: documentViewOf(d), Note: "Its content is not text."}, nil
	}
	p, err := documents.Read(ctx, db, d.ID, args.Offset, maxPiece)
	if err != nil {
		return nil, invalidIf(err, documents.ErrNotFound)
	}
	return piece{documentView: documentViewOf(d), Text: p.Text, Offset: p.Offset, Next: p.Next}, nil
}

func documentViewOf(d documents.Document) documentView {
	return documentView{ID: d.ID, Name: d.Name, ContentType: d.ContentType, Size: d.Size, IsText: d.IsText}
}
