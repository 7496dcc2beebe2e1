package channels

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	codeLength   = 8
	codeTTL      = time.Hour
	maxPending   = 3                                // senders of a channel with a live code; further senders get no code
	codeAlphabet = "ABCDEFGHJKMNPQRSTVWXYZ23456789" // without letters and digits that look alike
)

// ErrCode reports a pairing code that is unknown, used or expired.
var ErrCode = errors.New("the pairing code is unknown, used or expired")

// Identity is a sender of a channel, without its code.
type Identity struct {
	ID           string     `json:"id"`
	Channel      string     `json:"channel"`
	Subject      string     `json:"subject"` // the provider's id
	Name         string     `json:"name"`    // that the sender shows
	Conversation string     `json:"conversation"`
	Status       string     `json:"status"` // pending or paired
	ExpiresAt    *time.Time `json:"expires_at"`
	PairedBy     string     `json:"paired_by"`
	PairedAt     *time.Time `json:"paired_at"`
	CreatedAt    time.Time  `json:"created_at"`
}

const identityColumns = `id::text, channel, subject, name, conversation, status, expires_at, paired_by, paired_at,
	created_at`

// Identities lists the senders of all channels, waiting ones first. It omits expired codes.
func Identities(ctx context.Context, db postgres.DB, limit int) ([]Identity, error) {
	return postgres.Rows[Identity](ctx, db, "list senders of channels", `
		select `+identityColumns+` from agent_channel_identities
		 where status = 'paired' or expires_at > clock_timestamp()
		 order by status desc, id desc limit @limit`,
		postgres.Strict{"limit": postgres.PageSize(limit, 50, 500)})
}

// Pair confirms the sender with a code, who may then write as a visitor. The error is [ErrCode] if no sender has that
// code.
func Pair(ctx context.Context, tx pgx.Tx, code, by string) (Identity, error) {
	return postgres.RowOr[Identity](ctx, tx, ErrCode, "pair sender", `
		update agent_channel_identities
		   set status = 'paired', expires_at = null, code_sha256 = '', paired_by = @by, paired_at = clock_timestamp()
		 where status = 'pending' and expires_at > clock_timestamp() and code_sha256 = @code
		returning `+identityColumns,
		postgres.Strict{"code": digest(strings.ToUpper(strings.TrimSpace(code))), "by": by})
}

// Unpair deletes a sender, who must then pair again. It returns false if there is none.
func Unpair(ctx context.Context, db postgres.DB, channel, subject string) (bool, error) {
	tag, err := db.Exec(ctx, `delete from agent_channel_identities where channel = @channel and subject = @subject`,
		postgres.Strict{"channel": channel, "subject": subject})
	return postgres.Changed(tag, err, "unpair sender")
}

func digest(code string) string {
	sum := sha256.Sum256([]byte(code))
	return hex.EncodeToString(sum[:])
}

func newCode() string {
	raw := make([]byte, codeLength)
	rand.Read(raw) // never fails
	for i := range raw {
		raw[i] = codeAlphabet[int(raw[i])%len(codeAlphabet)]
	}
	return string(raw)
}

// checkSender reports whether the sender of a message is paired. An unknown sender gets a code, at most once in
// codeTTL, and none while maxPending others have one. A code that the provider refused to send does not count. A
// repeated attempt replaces the code, because the earlier attempt may have ended before it sent its code.
func (w *worker) checkSender(ctx context.Context, e entry) (paired bool, err error) {
	code := newCode()
	issued, full := false, false
	err = postgres.InTx(ctx, w.Pool, func(tx pgx.Tx) error {
		paired, issued, full = false, false, false
		if err := exec(ctx, tx, "lock pairings", `select pg_advisory_xact_lock(hashtextextended('pair ' || @channel, 0))`,
			postgres.Strict{"channel": w.name}); err != nil { // before the snapshot that counts them
			return err
		}
		var status string
		var live bool
		var pending int
		err := tx.QueryRow(ctx, `
			select coalesce(i.status, ''), coalesce(i.expires_at > clock_timestamp(), false),
			       (select count(*) from agent_channel_identities p where p.channel = @channel and p.status = 'pending'
			           and p.expires_at > clock_timestamp())
			  from (select) one left join agent_channel_identities i on i.channel = @channel and i.subject = @subject`,
			postgres.Strict{"channel": w.name, "subject": e.Sender}).Scan(&status, &live, &pending)
		if err != nil {
			return fmt.Errorf("read sender: %w", err)
		}
		switch {
		case status == "paired":
			paired = true
			return nil
		case live && e.Attempts == 1: // it has its code
			return nil
		case !live && pending >= maxPending:
			full = true
			return nil
		}
		issued = true
		return exec(ctx, tx, "store pairing code", `
			with expired as (
			  delete from agent_channel_identities
			   where channel = @channel and status = 'pending' and subject <> @subject
			     and expires_at < clock_timestamp() - interval '1 day')
			insert into agent_channel_identities as i (channel, subject, name, conversation, status, code_sha256, expires_at)
			values (@channel, @subject, @name, @conversation, 'pending', @code,
			        clock_timestamp() + make_interval(secs => @ttl))
			on conflict (channel, subject) do update
			   set name = excluded.name, conversation = excluded.conversation, code_sha256 = excluded.code_sha256,
			       expires_at = excluded.expires_at, created_at = clock_timestamp()`,
			postgres.Strict{
				"channel": w.name, "subject": e.Sender, "name": e.SenderName, "conversation": e.Conversation,
				"code": digest(code), "ttl": codeTTL.Seconds(),
			})
	})
	if err != nil || paired {
		return paired, err
	}
	switch {
	case issued:
		err := w.reply(ctx, e, "I do not know you yet. Give this code to an admin, within an hour:\n\n`"+code+
			"`\n\nAfter that, please write again.")
		if failure, known := errors.AsType[*SendError](err); known && !failure.MaybeSent { // nobody has the code
			return false, exec(context.WithoutCancel(ctx), w.Pool, "expire pairing code", `
				update agent_channel_identities set expires_at = clock_timestamp()
				 where channel = @channel and subject = @subject and code_sha256 = @code`,
				postgres.Strict{"channel": w.name, "subject": e.Sender, "code": digest(code)})
		}
	case full:
		w.Logger.WarnContext(ctx, "too many senders wait to be paired; this one got no code", "channel", w.name)
	}
	return false, nil
}

// reply sends a message outside the thread. It makes one attempt, and logs its error: the sender may write again.
func (w *worker) reply(ctx context.Context, e entry, text string) error {
	_, err := w.transport.Send(ctx, Message{
		ID: e.ID, Conversation: e.Conversation, Markdown: text, ReplyTo: e.MessageRef,
	})
	if err != nil {
		w.Logger.WarnContext(ctx, "channel reply not sent", "channel", w.name, "error", message(err))
	}
	return err
}
