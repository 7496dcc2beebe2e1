package memory

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
	"github.com/lanekeeper/lanekeeper/models"
)

const (
	embedEvery    = 5 * time.Second // interval of the search for new revisions
	embedAllEvery = time.Hour       // interval of the full comparison
	embedOverlap  = 10 * time.Minute
	embedBatch    = 32 // texts in one request
	embedTimeout  = time.Minute
	embedClaim    = 5 * time.Minute // lifetime of a claim; after it, another process may claim the entry
	maxEmbedPause = 5 * time.Minute // between passes while the server fails
	maxEmbedded   = 8000            // bytes of a text that are embedded
	shortEmbedded = 2000            // of a text that the server rejected
	otherModelTTL = 24 * time.Hour  // retention of another model's vectors
)

// Run embeds entries until ctx ends, and returns nil. Several processes may run it: each claims its entries. Run logs
// the first of consecutive failures. A nil Index returns at once.
func (x *Index) Run(ctx context.Context, db postgres.DB) error {
	if x == nil {
		return nil
	}
	var nextFull time.Time // time of the next full comparison
	var since time.Time
	pause, failing := embedEvery, false
	for {
		began := time.Now()
		full := !began.Before(nextFull)
		if full {
			since = time.Time{}
		}
		_, err := x.Update(ctx, db, since)
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // the process stops
		case err != nil:
			if !failing {
				x.log.WarnContext(ctx, "memories not embedded; the next pass retries", "model", x.model.Model(), "error", err)
			}
			failing, pause = true, min(2*pause, maxEmbedPause)
		default:
			if failing {
				x.log.InfoContext(ctx, "memory embedding resumed", "model", x.model.Model())
			}
			failing, pause, since = false, embedEvery, began.Add(-embedOverlap)
			if full {
				nextFull = began.Add(embedAllEvery)
			}
		}
		if !sleep.For(ctx, pause) {
			return nil
		}
	}
}

// vectorVersion is the version of the extension vector; null if it is not installed.
const vectorVersion = `(select x.extversion from pg_extension x where x.extname = 'vector')`

// Update embeds the entries written since a time that lack a vector, and failed ones that are due again. It returns
// how many it embedded. Without the extension vector it does nothing. The zero time covers all entries, and removes
// vectors of other models after a day.
func (x *Index) Update(ctx context.Context, db postgres.DB, since time.Time) (embedded int, err error) {
	var version *string
	if err := db.QueryRow(ctx, `select `+vectorVersion).Scan(&version); err != nil || version == nil {
		return 0, err
	}
	if since.IsZero() {
		if err := x.deleteOtherModels(ctx, db); err != nil {
			return 0, err
		}
	}
	for {
		claimed, err := x.claim(ctx, db, since)
		if err != nil || len(claimed) == 0 {
			return embedded, err
		}
		n, err := x.embed(ctx, db, claimed)
		embedded += n
		if err != nil {
			return embedded, err
		}
	}
}

// claimedEntry is a claimed revision of an entry.
type claimedEntry struct {
	ID       string
	Revision int
	Key      string
	Value    json.RawMessage
}

// claim claims the next entries to embed. An unfulfilled claim expires after some minutes.
func (x *Index) claim(ctx context.Context, db postgres.DB, since time.Time) ([]claimedEntry, error) {
	return postgres.Rows[claimedEntry](ctx, db, "claim memories to embed", `
		with wanted as (
		  (select m.id
		     from agent_memory m left join agent_memory_embeddings e on e.memory_id = m.id and e.model = @model
		    where m.updated_at >= @since and (m.expires_at is null or m.expires_at > clock_timestamp())
		      and (e.memory_id is null or e.revision < m.revision)
		    order by m.updated_at limit @most)
		  union
		  (select e.memory_id from agent_memory_embeddings e
		    where e.model = @model and e.due_at <= statement_timestamp() order by e.due_at limit @most)),
		held as (
		  select m.id, m.revision, m.key, m.value
		    from agent_memory m join wanted w on w.id = m.id
		   where m.expires_at is null or m.expires_at > clock_timestamp()
		   order by m.id limit @most for key share of m skip locked),
		claims as (
		  insert into agent_memory_embeddings as e (memory_id, model, revision, due_at)
		  select h.id, @model, h.revision, clock_timestamp() + make_interval(secs => @claim::float8) from held h order by h.id
		  on conflict (memory_id, model) do update
		     set revision = excluded.revision, vector = null, dimensions = null, due_at = excluded.due_at,
		         updated_at = clock_timestamp(),
		         attempts = case when e.revision = excluded.revision then e.attempts else 0 end
		   where e.revision < excluded.revision or e.revision = excluded.revision and e.due_at <= clock_timestamp()
		  returning e.memory_id, e.revision)
		select h.id, h.revision, h.key, h.value from held h join claims c on c.memory_id = h.id and c.revision = h.revision`,
		postgres.Strict{
			"model": x.model.Model(), "since": since, "most": embedBatch, "claim": embedClaim.Seconds(),
		})
}

// embed embeds claimed entries in one request, or one by one if the server rejects the request. A rejected text is
// shortened once, then delayed. embed returns an error if the server fails, or rejects each of several texts.
func (x *Index) embed(ctx context.Context, db postgres.DB, list []claimedEntry) (int, error) {
	vectors, err := x.requestVectors(ctx, list, maxEmbedded)
	switch {
	case err == nil:
		return len(list), x.store(ctx, db, list, vectors)
	case !refused(err):
		return 0, errors.Join(fmt.Errorf("embed memories: %w", err), x.release(context.WithoutCancel(ctx), db, list))
	}
	done, last := 0, err
	for i, one := range list {
		one := []claimedEntry{one}
		vectors, err := x.requestVectors(ctx, one, maxEmbedded)
		if refused(err) {
			vectors, err = x.requestVectors(ctx, one, shortEmbedded)
		}
		switch {
		case err == nil:
			err = x.store(ctx, db, one, vectors)
			done++
		case refused(err):
			last, err = err, x.delayRetry(ctx, db, one[0], err)
		default:
			err = errors.Join(fmt.Errorf("embed memories: %w", err), x.release(context.WithoutCancel(ctx), db, list[i:]))
		}
		if err != nil {
			return done, err
		}
	}
	if done == 0 && len(list) > 1 {
		return 0, fmt.Errorf("embed memories: %w", last)
	}
	return done, nil
}

func (x *Index) requestVectors(ctx context.Context, list []claimedEntry, most int) ([][]float32, error) {
	texts := make([]string, len(list))
	for i, c := range list {
		texts[i] = c.text(most)
	}
	ctx, cancel := context.WithTimeout(ctx, embedTimeout)
	defer cancel()
	return x.model.Embed(ctx, texts)
}

// refused reports an error that may concern the texts and not the server. Some servers respond with status 500 to a
// text that is too long.
func refused(err error) bool {
	modelErr, ok := errors.AsType[*models.Error](err)
	return ok && slices.Contains([]int{
		http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnprocessableEntity,
		http.StatusInternalServerError,
	}, modelErr.Status)
}

// text returns the text to embed: the key and the value, unquoted if it is a text.
func (c claimedEntry) text(most int) string {
	value := string(c.Value)
	var plain string
	if json.Unmarshal(c.Value, &plain) == nil {
		value = plain
	}
	return truncateBytes(c.Key+": "+value, most)
}

// truncateBytes cuts a text to a number of bytes, and drops a broken character at its end.
func truncateBytes(text string, most int) string {
	return strings.ToValidUTF8(text[:min(most, len(text))], "")
}

// store stores the vectors of revisions that no later claim has replaced.
func (x *Index) store(ctx context.Context, db postgres.DB, list []claimedEntry, vectors [][]float32) error {
	ids, revisions := keys(list)
	texts := make([]string, len(vectors))
	for i, v := range vectors {
		texts[i] = arrayText(v)
	}
	_, err := db.Exec(ctx, `
		update agent_memory_embeddings e
		   set vector = n.vector::real[], dimensions = cardinality(n.vector::real[]), due_at = null, attempts = 0,
		       updated_at = clock_timestamp()
		  from unnest(@ids::uuid[], @revisions::int[], @vectors::text[]) n (id, revision, vector)
		 where e.memory_id = n.id and e.model = @model and e.revision = n.revision`,
		postgres.Strict{"ids": ids, "revisions": revisions, "vectors": texts, "model": x.model.Model()})
	if err != nil {
		return fmt.Errorf("store embeddings of memories: %w", err)
	}
	return nil
}

// arrayText formats a vector as a PostgreSQL array.
func arrayText(vector []float32) string {
	b := []byte{'{'}
	for i, f := range vector {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendFloat(b, float64(f), 'g', -1, 32)
	}
	return string(append(b, '}'))
}

// release makes claims due again at once.
func (x *Index) release(ctx context.Context, db postgres.DB, list []claimedEntry) error {
	ids, revisions := keys(list)
	_, err := db.Exec(ctx, `
		update agent_memory_embeddings e set due_at = clock_timestamp()
		  from unnest(@ids::uuid[], @revisions::int[]) n (id, revision)
		 where e.memory_id = n.id and e.model = @model and e.revision = n.revision and e.due_at is not null`,
		postgres.Strict{"ids": ids, "revisions": revisions, "model": x.model.Model()})
	if err != nil {
		return fmt.Errorf("release memories to embed: %w", err)
	}
	return nil
}

// delayRetry delays a rejected text: by 5 minutes, then 20, then 80, at most a day.
func (x *Index) delayRetry(ctx context.Context, db postgres.DB, c claimedEntry, why error) error {
	x.log.WarnContext(ctx, "embedding server rejected a memory; only word search finds it",
		"id", c.ID, "model", x.model.Model(), "error", why)
	_, err := db.Exec(ctx, `
		update agent_memory_embeddings e
		   set attempts = e.attempts + 1,
		     due_at = clock_timestamp() + least(interval '1 day', interval '5 minutes' * 4 ^ least(e.attempts, 10))
		 where e.memory_id = @id and e.model = @model and e.revision = @revision and e.due_at is not null`,
		postgres.Strict{"id": c.ID, "model": x.model.Model(), "revision": c.Revision})
	if err != nil {
		return fmt.Errorf("delay memory to embed: %w", err)
	}
	return nil
}

func keys(list []claimedEntry) (ids []string, revisions []int) {
	for _, c := range list {
		ids, revisions = append(ids, c.ID), append(revisions, c.Revision)
	}
	return ids, revisions
}

// deleteOtherModels removes vectors of other models after a day. Until then, a process with the other setting may need
// them.
func (x *Index) deleteOtherModels(ctx context.Context, db postgres.DB) error {
	const batch = 1000
	for {
		tag, err := db.Exec(ctx, `
			delete from agent_memory_embeddings e
			 where (e.memory_id, e.model) in (
			         select o.memory_id, o.model from agent_memory_embeddings o
			          where o.model <> @model and o.updated_at < statement_timestamp() - make_interval(secs => @kept::float8)
			            limit @most)`,
			postgres.Strict{"model": x.model.Model(), "kept": otherModelTTL.Seconds(), "most": batch})
		if err != nil {
			return fmt.Errorf("remove embeddings of other models: %w", err)
		}
		if tag.RowsAffected() < batch {
			return nil
		}
	}
}
