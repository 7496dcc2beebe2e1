package channels

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// Errors of [Principals].
var (
	ErrNotLinked = errors.New("the account is not linked to a principal")
	ErrMayNot    = errors.New("the principal may not decide approvals")
)

// Principals finds the person who decides.
type Principals interface {
	// Approver returns the name of an account's principal, and a context that acts for it through via with a message of
	// the provider. Its errors are [ErrNotLinked] and [ErrMayNot].
	Approver(ctx context.Context, issuer, subject, via, message string) (acting context.Context, name string, err error)
	// Asking returns a context that acts for the principal of an account, or ctx if it is linked to none.
	Asking(ctx context.Context, issuer, subject, via, message string) (acting context.Context, err error)
}

// maxArguments bounds the arguments that a message shows with buttons. Nobody may approve unreadable arguments.
const maxArguments = 2500

// maxRequests bounds the messages for one request for approval in one conversation.
const maxRequests = 3

// requestApprovals shows new requests for approval in the conversation for reports: those of the channel's agent and of
// the channel's threads, or all if the channel names no agent. It repeats a request without a confirmed message after a
// minute, because nobody may have seen it.
func (w *worker) requestApprovals(ctx context.Context) error {
	if w.channel.ReportTo == "" {
		return nil
	}
	ids, err := postgres.Names(ctx, w.Pool, "find requests for approval", `
		select a.id::text from agent_approvals a left join agent_executions x on x.id = a.execution_id
		 where a.status = 'pending' and a.expires_at > clock_timestamp()
		   and (@agent = ''
		     or @agent in (x.agent, (select n.agent from agent_activity n where n.id = a.activity_id)) or exists (
		     select from agent_threads t where t.id = x.thread_id and t.target = @channel and t.channel = @type))
		   and coalesce((select bool_and(b.message_ref = '' and b.created_at < clock_timestamp() - interval '1 minute')
		         and count(*) < 2 * @tries from agent_channel_buttons b
		     where b.approval_id = a.id and b.channel = @channel and b.conversation = @conversation), true)
		 order by a.id limit 10`,
		postgres.Strict{
			"agent": w.channel.Agent, "channel": w.name, "type": w.channel.Type, "conversation": w.channel.ReportTo,
			"tries": maxRequests,
		})
	if err != nil {
		return err
	}
	for _, id := range ids {
		a, err := approvals.Get(ctx, w.Pool, id)
		if err == nil {
			err = w.requestApproval(ctx, a)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// requestApproval shows one request. It stores the buttons first: if the provider's answer is lost, the message may
// still have been sent, and its buttons work beside those of a repeated message.
func (w *worker) requestApproval(ctx context.Context, a approvals.Approval) error {
	text, whole := approvalText(a, w.transport.Limits())
	if !w.transport.Limits().Buttons { // the stored buttons still mark the request as shown; no message has their nonces
		whole, text = false, text+"\n\n"+w.decideElsewhere(a.ID)
	}
	hash, err := approvals.Hash(a.Arguments)
	if err != nil {
		return err
	}
	approve, reject := rand.Text(), rand.Text()
	err = exec(ctx, w.Pool, "store buttons", `
		insert into agent_channel_buttons (nonce, channel, conversation, approval_id, approve, arguments_hash, expires_at)
		select b.nonce, @channel, @conversation, @approval, b.approve, @hash, @expires
		  from (values (@approves, true), (@rejects, false)) b (nonce, approve)`,
		postgres.Strict{
			"channel": w.name, "conversation": w.channel.ReportTo, "approval": a.ID, "hash": hash, "expires": a.ExpiresAt,
			"approves": approve, "rejects": reject,
		})
	if err != nil {
		return err
	}
	m := Message{ID: a.ID, Conversation: w.channel.ReportTo, Markdown: text}
	if whole {
		m.Buttons = []Button{{"Approve", approve}, {"Reject", reject}}
	}
	ref, err := w.transport.Send(ctx, m)
	failure, known := errors.AsType[*SendError](err)
	if known && failure.RetryAfter > 0 {
		w.keepQuiet(failure.RetryAfter)
	}
	switch {
	case err == nil:
		return exec(ctx, w.Pool, "record buttons", `
			update agent_channel_buttons set message_ref = @ref where nonce in (@approves, @rejects)`,
			postgres.Strict{"ref": ref, "approves": approve, "rejects": reject})
	case known && !failure.MaybeSent && !failure.Permanent: // a later pass shows it
		return errors.Join(err, exec(ctx, w.Pool, "delete buttons", `
			delete from agent_channel_buttons where nonce in (@approves, @rejects)`,
			postgres.Strict{"approves": approve, "rejects": reject}))
	}
	return fmt.Errorf("show request for approval %s: %w", a.ID, err)
}

// decideElsewhere names the place to decide a request that the channel shows without buttons.
func (w *worker) decideElsewhere(id string) string {
	where := "with " + Code("agent approvals show "+id)
	if w.PublicURL != "" {
		where = "at " + strings.TrimRight(w.PublicURL, "/") + "/approvals/" + id
	}
	return "Decide in the Engine Room, " + where + ". An answer to this message decides nothing."
}

// approvalText describes a request in one part. whole is false if the arguments do not fit.
func approvalText(a approvals.Approval, limits Limits) (text string, whole bool) {
	var arguments bytes.Buffer
	shown := redact.JSON(a.Arguments, 16*maxArguments) // a marker is longer than a short secret
	if json.Indent(&arguments, shown, "", "  ") != nil {
		arguments.Reset()
		arguments.Write(shown)
	}
	whole = len(a.Arguments) <= maxArguments && arguments.Len() <= 2*maxArguments
	text = "**Approval requested:** " + Code(a.SkillName) + "\n"
	if by := a.AskedBy(); by != "" {
		text += "Asked by " + Code(cut(by, 300)) + "\n"
	}
	if full := text + "\n" + Fence(arguments.String(), "json"); whole && len(Split(full, limits)) == 1 {
		return full, true
	}
	return text + "\nThe arguments are too long to show here. Decide in the Engine Room, or with " +
		Code("agent approvals show "+a.ID) + ".", false
}

// shownRequest is a message that shows a request.
type shownRequest struct{ ApprovalID, Conversation, MessageRef string }

// showDecisions edits the messages of requests that are decided or void, and ends their buttons. An ended button marks
// its message as edited.
func (w *worker) showDecisions(ctx context.Context) error {
	editor, ok := w.transport.(Editor)
	if !ok {
		return nil
	}
	list, err := postgres.Rows[shownRequest](ctx, w.Pool, "find decided requests", `
		select distinct b.approval_id::text, b.conversation, b.message_ref
		  from agent_channel_buttons b join agent_approvals a on a.id = b.approval_id
		 where b.channel = @channel and b.message_ref <> '' and b.expires_at > clock_timestamp() and a.status <> 'pending'
		 limit 10`, postgres.Strict{"channel": w.name})
	if err != nil {
		return err
	}
	var failures []error
	for _, r := range list {
		if w.isQuiet() {
			break
		}
		a, err := approvals.Get(ctx, w.Pool, r.ApprovalID)
		if err != nil {
			return err
		}
		err = editor.Edit(ctx, r.MessageRef, Message{ID: a.ID, Conversation: r.Conversation, Markdown: w.decidedText(a)})
		failure, known := errors.AsType[*SendError](err)
		switch {
		case known && failure.Permanent: // a person has deleted it
			w.Logger.WarnContext(ctx, "decision not shown", "channel", w.name, "error", message(err))
		case err != nil:
			if known && failure.RetryAfter > 0 {
				w.keepQuiet(failure.RetryAfter)
			}
			failures = append(failures, fmt.Errorf("show decision about request %s: %w", a.ID, err))
			continue
		}
		err = exec(ctx, w.Pool, "end buttons", `
			update agent_channel_buttons set expires_at = clock_timestamp()
			 where approval_id = @id::uuid and channel = @channel and message_ref = @ref`,
			postgres.Strict{"id": a.ID, "channel": w.name, "ref": r.MessageRef})
		if err != nil {
			return err
		}
	}
	return errors.Join(failures...)
}

// click decides an approval, or returns the reason for a refusal.
func (w *worker) click(ctx context.Context, e entry) {
	answer, decided, err := w.decide(ctx, e)
	if err != nil {
		w.postpone(ctx, e, err)
		return
	}
	if acknowledger, ok := w.transport.(Acknowledger); ok {
		err := acknowledger.Acknowledge(ctx, Incoming{
			ExternalID: e.ID, Conversation: e.Conversation, Ref: e.Ref, MessageRef: e.MessageRef, Sender: e.Sender,
		}, answer)
		if err != nil {
			w.Logger.WarnContext(ctx, "click not answered", "channel", w.name, "error", message(err))
		}
	}
	if !decided {
		w.Logger.WarnContext(ctx, "click refused", "channel", w.name, "sender", e.Sender, "reason", answer)
		w.finish(ctx, e, "ignored", answer)
		return
	}
	w.finish(ctx, e, "done", "")
	w.wakeWatch()
}

// button is a row of agent_channel_buttons.
type button struct {
	ApprovalID   string
	Approve      bool
	Hash         string
	Conversation string
	MessageRef   string
	Expired      bool
	Used         bool // by another click
}

// matches reports whether a click comes from the conversation of the button. A message to a user's id of Slack, or to a
// @name of Telegram, arrives in a conversation with another id. The reference of the message has that id.
func (b button) matches(e entry) bool {
	return b.Conversation == e.Conversation || b.MessageRef == e.MessageRef &&
		(strings.HasPrefix(b.MessageRef, e.Conversation+":") || strings.HasPrefix(b.Conversation, "@"))
}

// decide checks a click and decides. answer is shown to the person who clicked; decided is false for a refused click.
func (w *worker) decide(ctx context.Context, e entry) (answer string, decided bool, err error) {
	b, err := w.button(ctx, e)
	if errors.Is(err, errNoButton) || err == nil && !b.matches(e) {
		return "This button is not valid.", false, nil
	}
	if err != nil {
		return "", false, err
	}
	acting, name, refusal, err := w.approver(ctx, e)
	switch {
	case err != nil || refusal != "":
		return refusal, false, err
	case b.Used:
		return "This button was used already.", false, nil
	case b.Expired:
		return "This button has expired.", false, nil
	}
	a, err := approvals.Get(ctx, w.Pool, b.ApprovalID)
	if err != nil {
		return "", false, err
	}
	if hash, err := approvals.Hash(a.Arguments); err != nil || hash != b.Hash {
		return "The arguments have changed since this was shown. Decide in the Engine Room.", false, err
	}
	if a.Own(name) {
		return "You requested this call. Another approver must decide it.", false, nil
	}
	if a.RootOnly() {
		return "Four eyes: the requester is unknown. Only root can decide this.", false, nil
	}
	tag, err := w.Pool.Exec(ctx, `
		update agent_channel_buttons
		   set used_at = clock_timestamp(), used_by = @entry,
		       message_ref = case when message_ref = '' then @message else message_ref end
		 where nonce = @nonce and (used_at is null or used_by = @entry) and expires_at > clock_timestamp()`,
		postgres.Strict{"nonce": e.Click, "entry": e.ID, "message": e.MessageRef})
	if changed, err := postgres.Changed(tag, err, "use button"); err != nil || !changed {
		return "This button was used already.", false, err
	}
	verb := "rejected"
	if b.Approve {
		verb = "approved"
	}
	_, err = approvals.Decide(acting, w.Pool, b.ApprovalID, b.Approve, name,
		fmt.Sprintf("%s in %s %s (message %s)", verb, w.channel.Type, w.name, e.MessageRef))
	if errors.Is(err, approvals.ErrFourEyes) { // requested again meanwhile
		return err.Error(), false, nil
	}
	if earlier, ok := errors.AsType[*approvals.DecidedError](err); ok {
		return strings.ToUpper(earlier.Error()[:1]) + earlier.Error()[1:] + ".", true, nil
	}
	if err != nil {
		return "", false, err
	}
	return "You have " + verb + " this.", true, nil
}

// decidedText describes a request and its decision in one part.
func (w *worker) decidedText(a approvals.Approval) string {
	decision := "**Void:** " + Code(a.Reason)
	if a.DecidedAt != nil {
		verb := "Approved"
		if a.Status == "rejected" {
			verb = "Rejected"
		}
		decision = fmt.Sprintf("**%s** by %s at %s", verb, Code(a.DecidedBy),
			a.DecidedAt.UTC().Format("2006-01-02 15:04 UTC"))
	}
	limits := w.transport.Limits()
	limits.Text -= UTF16("\n\n" + decision)
	text, _ := approvalText(a, limits)
	return text + "\n\n" + decision
}

var errNoButton = errors.New("there is no such button")

// button reads the button of a click.
func (w *worker) button(ctx context.Context, e entry) (button, error) {
	return postgres.RowOr[button](ctx, w.Pool, errNoButton, "read button", `
		select approval_id::text, approve, arguments_hash as hash, conversation, message_ref,
		       expires_at <= clock_timestamp() as expired, used_at is not null and used_by <> @entry as used
		  from agent_channel_buttons where nonce = @nonce and channel = @channel`,
		postgres.Strict{"nonce": e.Click, "channel": w.name, "entry": e.ID})
}

// approver finds the principal of a click. refusal is the reason if there is none.
func (w *worker) approver(ctx context.Context, e entry) (acting context.Context, name, refusal string, err error) {
	if w.Principals == nil {
		return nil, "", "Approvals are not decided here.", nil
	}
	issuer, err := w.transport.Issuer(ctx)
	if err != nil {
		return nil, "", "", err
	}
	acting, name, err = w.Principals.Approver(ctx, issuer, e.Sender, w.channel.Type, e.MessageRef)
	switch {
	case errors.Is(err, ErrNotLinked):
		return nil, "", fmt.Sprintf("Your account %s at %s is not linked to a principal. Ask an admin to link it.", e.Sender,
			issuer), nil
	case errors.Is(err, ErrMayNot):
		return nil, "", "You may not decide approvals.", nil
	}
	return acting, name, "", err
}
