package evals

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Words of a label. Unlabeled withdraws a label.
const (
	Good      = "good"
	Bad       = "bad"
	Unlabeled = "none"
)

// maxNote bounds the note of a label, in bytes.
const maxNote = 2000

// Errors of labels.
var (
	ErrLabel    = errors.New("a label is good, bad or none, with a note of at most 2000 bytes")
	ErrTrial    = fmt.Errorf("a trial has a number from 1 to %d", maxTrials)
	ErrNoAnswer = errors.New("the trial has no answer")
)

// Label is a person's verdict about the answer of a trial. It contains the answer, so it outlives the run.
type Label struct {
	Run       string    `json:"run"`
	Suite     string    `json:"suite"`
	Case      string    `json:"case"`
	Trial     int       `json:"trial"`
	Answer    string    `json:"answer"`
	Digest    string    `json:"answer_digest"` // SHA-256
	Word      string    `json:"label"`         // good or bad; none for a label that was withdrawn
	Good      bool      `json:"good"`
	Note      string    `json:"note"`
	Principal string    `json:"principal"`
	CreatedAt time.Time `json:"created_at,omitzero"`
}

// NewLabel is a label to store. Word is Good, Bad or Unlabeled.
type NewLabel struct {
	Run   string `json:"run"`
	Case  string `json:"case"`
	Trial int    `json:"trial,omitempty"` // 0 means the first
	Word  string `json:"label"`
	Note  string `json:"note,omitempty"`
}

// PutLabel stores or withdraws the caller's label of a trial, and records the change in the audit. It returns
// [ErrNotFound] for an unknown trial, [ErrNoAnswer] for a label of a trial without an answer, and [ErrTrial] or
// [ErrLabel] for an invalid label.
func PutLabel(
	ctx context.Context, db postgres.Beginner, l NewLabel,
) (stored Label, recorded activity.Recorded, err error) {
	if l.Trial < 0 || l.Trial > maxTrials {
		return stored, recorded, ErrTrial
	}
	l.Trial = cmp.Or(l.Trial, 1)
	if l.Word != Good && l.Word != Bad && l.Word != Unlabeled || len(l.Note) > maxNote {
		return stored, recorded, ErrLabel
	}
	input := map[string]any{"run": l.Run, "case": l.Case, "trial": l.Trial, "label": l.Word}
	act := activity.Act{Name: "label_eval", Reason: l.Note, Input: input}
	recorded, err = activity.Record(ctx, db, act, func(tx pgx.Tx, _ string) (any, error) {
		run, err := GetRun(ctx, tx, l.Run)
		if err != nil {
			return nil, err
		}
		t, err := GetTrial(ctx, tx, l.Run, l.Case, l.Trial)
		switch {
		case err != nil:
			return nil, err
		case t.Answer == "" && l.Word != Unlabeled:
			return nil, ErrNoAnswer
		}
		input["eval"] = run.Suite
		digest := sha256.Sum256([]byte(t.Answer))
		stored = Label{
			Run: l.Run, Suite: run.Suite, Case: l.Case, Trial: l.Trial, Answer: t.Answer, Note: l.Note,
			Word: l.Word, Good: l.Word == Good,
			Digest: hex.EncodeToString(digest[:]), Principal: activity.ActorFrom(ctx).Name,
		}
		changed, err := stored.put(ctx, tx, l.Word == Unlabeled)
		if err == nil && !changed {
			return activity.Unchanged, nil
		}
		return map[string]bool{"changed": true}, err
	})
	return stored, recorded, err
}

// put writes or deletes the label, and reports whether anything changed.
func (l *Label) put(ctx context.Context, tx pgx.Tx, withdraw bool) (bool, error) {
	args := postgres.Strict{"run": l.Run, "case": l.Case, "trial": l.Trial, "principal": l.Principal}
	if withdraw {
		tag, err := tx.Exec(ctx, `
			delete from agent_eval_labels
			 where run_id = @run and case_name = @case and trial = @trial and principal = @principal`, args)
		if err != nil {
			return false, fmt.Errorf("withdraw label: %w", err)
		}
		return tag.RowsAffected() > 0, nil
	}
	args["suite"], args["answer"], args["digest"], args["good"], args["note"] = l.Suite, l.Answer, l.Digest, l.Good, l.Note
	err := tx.QueryRow(ctx, `
		insert into agent_eval_labels (run_id, case_name, trial, principal, suite, answer, answer_digest, good, note)
		values (@run, @case, @trial, @principal, @suite, @answer, @digest, @good, @note)
		on conflict (run_id, case_name, trial, principal) do update
		   set answer = excluded.answer, answer_digest = excluded.answer_digest, good = excluded.good, note = excluded.note,
		       created_at = clock_timestamp()
		returning created_at`, args).Scan(&l.CreatedAt)
	if err != nil {
		return false, fmt.Errorf("store label: %w", err)
	}
	return true, nil
}

// Labels lists labels, newest first. A suite, run or case that is not empty narrows the list.
func Labels(ctx context.Context, db postgres.DB, suite, run, caseName string, limit int) ([]Label, error) {
	rows, err := db.Query(ctx, `
		select run_id::text, suite, case_name, trial, answer, answer_digest, case when good then 'good' else 'bad' end, good,
		       note, principal, created_at
		  from agent_eval_labels
		 where (@suite = '' or suite = @suite) and (@run = '' or run_id = nullif(@run, '')::uuid)
		   and (@case = '' or case_name = @case)
		 order by created_at desc, run_id, case_name, trial, principal limit @limit`,
		postgres.Strict{"suite": suite, "run": run, "case": caseName, "limit": limit})
	return postgres.Collect(rows, err, "list labels", pgx.RowToStructByPos[Label])
}
