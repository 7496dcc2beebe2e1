package threads

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

var (
	// ErrTaken reports a name that the principal uses for another thread.
	ErrTaken = errors.New("the name is in use for another thread")
	// ErrNoAccess reports an access that does not exist.
	ErrNoAccess = errors.New("the thread has no such access")
	// ErrToken reports a join token that is unknown, used, expired or revoked. Report ErrNotFound to external callers.
	ErrToken = errors.New("the join token is not valid")
)

// The lifetime of a join token.
const (
	DefaultTokenLife = 24 * time.Hour
	MaxTokenLife     = 30 * 24 * time.Hour
)

// tokenPrefix precedes the 256 random bits of a join token.
const tokenPrefix = "join_"

// Access is a row of agent_thread_access: a participant, or a join token.
type Access struct {
	ID          string     `json:"id"`
	ThreadID    string     `json:"thread_id"`
	Kind        string     `json:"kind"` // key, visitor, flow, webhook; token
	Owner       string     `json:"owner"`
	Name        string     `json:"name"`     // the participant's name for the thread
	Reusable    bool       `json:"reusable"` // of a token
	ExecutionID *string    `json:"execution_id"`
	ExpiresAt   *time.Time `json:"expires_at"`
	UsedAt      *time.Time `json:"used_at"`
	JoinedWith  *string    `json:"joined_with"` // the token that the participant used
	CreatedBy   string     `json:"created_by"`
	CreatedAt   time.Time  `json:"created_at"`
}

// Invitation describes a join token.
type Invitation struct {
	ThreadID    string
	Reusable    bool          // for any number of visitors; default one
	Life        time.Duration // default [DefaultTokenLife], at most [MaxTokenLife]
	ExecutionID string        // the token ends with this execution; "" for none
	By          string        // the creator
}

// Token is a join token. The database stores only the digest of its secret.
type Token struct {
	ID        string    `json:"id"`
	Secret    string    `json:"token"`
	ThreadID  string    `json:"thread_id"`
	ExpiresAt time.Time `json:"expires_at"`
}

// Invite creates a join token for a thread. No tool of a model calls it.
func Invite(ctx context.Context, db postgres.DB, invitation Invitation) (Token, error) {
	random := make([]byte, 32)
	_, _ = rand.Read(random) // never fails
	t := Token{Secret: tokenPrefix + base64.RawURLEncoding.EncodeToString(random), ThreadID: invitation.ThreadID}
	if invitation.Life <= 0 {
		invitation.Life = DefaultTokenLife
	}
	err := db.QueryRow(ctx, `
		insert into agent_thread_access (thread_id, kind, token_digest, reusable, execution_id, expires_at, created_by)
		select t.id, 'token', @digest, @reusable, nullif(@execution, '')::uuid,
		  clock_timestamp() + make_interval(secs => @life), @by
		  from agent_threads t where t.id = @thread
		returning id::text, expires_at`, postgres.Strict{
		"thread": postgres.Text(invitation.ThreadID), "digest": tokenDigest(t.Secret), "reusable": invitation.Reusable,
		"execution": invitation.ExecutionID,
		"life":      min(invitation.Life, MaxTokenLife).Seconds(), "by": postgres.Text(invitation.By),
	}).Scan(&t.ID, &t.ExpiresAt)
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotFound
	}
	if err != nil {
		return Token{}, fmt.Errorf("invite into thread: %w", err)
	}
	return t, nil
}

func tokenDigest(secret string) []byte {
	sum := sha256.Sum256([]byte(secret))
	return sum[:]
}

// Join gives p access to the thread of a join token, under a name of p's own. chosen is false for a generated name; a
// repeated Join then returns the first name. [ErrToken]: the token is not valid. [ErrTaken]: the name is in use.
func Join(
	ctx context.Context, db postgres.DB, p Principal, token, name string, chosen bool,
) (thread, joinedName string, err error) {
	if err := CheckID(name); err != nil {
		return "", "", fmt.Errorf("join thread: %w", err)
	}
	var nameTaken bool
	b := &pgx.Batch{}
	// The second statement reads what others committed before the first one locked the token.
	b.Queue(`select from agent_thread_access a where a.token_digest = @digest for update`,
		postgres.Strict{"digest": tokenDigest(token)})
	b.Queue(`
		with token as (
		  select a.id, a.thread_id, a.used_at is null or a.reusable as fresh from agent_thread_access a
		   where a.token_digest = @digest and (a.expires_at > clock_timestamp()) is not false
		     and (a.execution_id is null or exists (select from agent_executions x where x.id = a.execution_id
		       and x.completed_at is null))),
		known as (
		  select a.thread_id, a.name from token k join agent_thread_access a on a.joined_with = k.id
		   where a.kind = @kind and a.owner = @owner and a.visitor = @proof and (a.name = @name or not @given::boolean)
		     order by a.id limit 1),
		fresh as (
		  select k.id, k.thread_id, lanekeeper.agent_thread_for(@kind, @owner, @proof, @name) is not null as taken
		    from token k
		   where k.fresh and not exists (select from known)),
		used as (
		  update agent_thread_access a set used_at = clock_timestamp() from fresh f where a.id = f.id and not f.taken
		    returning a.id, a.thread_id),
		made as (
		  insert into agent_thread_access (thread_id, kind, owner, visitor, name, joined_with, created_by)
		  select u.thread_id, @kind, @owner, @proof, @name, u.id, 'join token' from used u)
		select k.thread_id, k.name, false from known k union all select f.thread_id, @name::text, f.taken from fresh f`,
		postgres.Strict{
			"digest": tokenDigest(token), "kind": string(p.Kind), "owner": postgres.Text(p.Owner), "proof": p.Proof,
			"name": name, "given": chosen,
		}).QueryRow(func(row pgx.Row) error { return row.Scan(&thread, &joinedName, &nameTaken) })
	err = db.SendBatch(ctx, b).Close()
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		err = ErrToken
	case nameTaken || postgres.IsCode(err, "23505"):
		err = ErrTaken
	}
	if err != nil {
		return "", "", fmt.Errorf("join thread: %w", err)
	}
	return thread, joinedName, nil
}

// Grant gives a principal access to a thread, under a name of its own. For a flow, the name is the thread's id.
// grantedBy is stored as the creator.
func Grant(
	ctx context.Context, db postgres.DB, thread string, grantee Principal, name, grantedBy string,
) (id string, err error) {
	if grantee.Kind == ByFlow {
		name = thread
	}
	if err := CheckID(name); err != nil {
		return "", fmt.Errorf("give %s %s access to thread: %w", grantee.Kind, grantee.Owner, err)
	}
	if !slices.Contains([]Kind{ByKey, ByVisitor, ByFlow, ByWebhook}, grantee.Kind) || grantee.Owner == "" {
		return "", fmt.Errorf("give %s %q access to thread: name a key, a visitor, a flow or a webhook",
			grantee.Kind, grantee.Owner)
	}
	var exists bool
	var accessID *string
	err = db.QueryRow(ctx, `
		with thread as (select t.id from agent_threads t where t.id = @thread for key share),
		granted as (
		  insert into agent_thread_access as a (thread_id, kind, owner, visitor, name, created_by)
		  select t.id, @kind, @owner, @proof, @name, @by from thread t
		   where @kind = 'flow' or coalesce(lanekeeper.agent_thread_for(@kind, @owner, @proof, @name), t.id) = t.id
		  on conflict (kind, owner, visitor, name) where kind <> 'token' do update set thread_id = a.thread_id
		   where a.thread_id = excluded.thread_id
		  returning a.id)
		select exists (select from thread), (select g.id::text from granted g)`, postgres.Strict{
		"thread": postgres.Text(thread), "kind": string(grantee.Kind), "owner": postgres.Text(grantee.Owner),
		"proof": grantee.Proof, "name": name, "by": postgres.Text(grantedBy),
	}).Scan(&exists, &accessID)
	switch {
	case err != nil:
	case !exists:
		err = ErrNotFound
	case accessID == nil:
		err = ErrTaken
	default:
		id = *accessID
	}
	if err != nil {
		return "", fmt.Errorf("give %s %s access to thread: %w", grantee.Kind, grantee.Owner, err)
	}
	return id, nil
}

// AccessOf lists the accesses and join tokens of a thread, oldest first, at most 500.
func AccessOf(ctx context.Context, db postgres.DB, thread string) ([]Access, error) {
	return postgres.Rows[Access](ctx, db, "list access to thread", `
		select id::text, thread_id, kind, owner, name, reusable, execution_id::text, expires_at, used_at, joined_with::text,
		       created_by, created_at
		  from agent_thread_access where thread_id = @thread
		 order by id limit 500`, postgres.Strict{"thread": postgres.Text(thread)})
}

// AccessChannel notifies of each revoked access, with the id of the thread.
const AccessChannel = "agent_thread_access"

// Revoke deletes an access, or a join token with every access it gave, and notifies [AccessChannel]. [ErrNoAccess]: the
// thread has no such access. [ErrNotFound]: there is no such thread.
func Revoke(ctx context.Context, db postgres.DB, thread, id string) error {
	tag, err := db.Exec(ctx, `
		with revoked as (delete from agent_thread_access where id = @id and thread_id = @thread returning thread_id)
		select pg_notify(@channel, thread_id) from revoked`,
		postgres.Strict{"id": id, "thread": postgres.Text(thread), "channel": AccessChannel})
	if err == nil && tag.RowsAffected() == 0 {
		if _, err = Get(ctx, db, thread); err == nil {
			err = ErrNoAccess
		}
	}
	if err != nil {
		return fmt.Errorf("revoke access to thread: %w", err)
	}
	return nil
}
