package chat

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

const (
	mostFiles   = 10   // of one message
	mostExcerpt = 4000 // bytes of a text document that a model is shown with the message

	mostImageBytes = 2 * threads.MostImageSize // of the images among the files of a request
)

// FilesHandler serves POST /v1/files: a document of the visitor, for a message that names its id.
func (c *Chat) FilesHandler() http.Handler { return c.handler(c.upload) }

func (c *Chat) upload(w http.ResponseWriter, r *http.Request, id trace.ID) error {
	secret, made, err := c.secretOf(r)
	if err != nil {
		return err
	}
	token := secret
	if made {
		token = ""
	}
	if err := c.allow(r, c.Visitor(r), "", token); err != nil {
		return err
	}
	form, err := documents.ReadForm(r, c.DocumentBytes, false)
	if err != nil {
		return refusedFile(err)
	}
	who := Ask{Owner: c.Visitor(r), Secret: secret}.principal()
	u := form.Upload
	u.By, u.TraceID = who, string(id)
	if name := r.Header.Get(threadHeader); name != "" {
		thread, known, err := threads.Resolve(r.Context(), c.Front, who, name)
		if err != nil {
			return refused(err)
		}
		if known {
			u.ThreadID = thread
		}
	}
	var d documents.Document
	err = c.intake.Do(r.Context(), c.Front, "documents of "+who.Owner+" "+who.Proof, func(tx pgx.Tx) (err error) {
		d, err = documents.Add(r.Context(), tx, u)
		return err
	})
	if err != nil {
		return refusedFile(err)
	}
	if made {
		w.Header().Set(visitorHeader, secret)
	}
	answer := fileOf(d)
	answer.Purpose = form.Fields["purpose"]
	return writeFile(w, answer)
}

// refusedFile turns an error of a document into what a visitor may know of it.
func refusedFile(err error) error {
	r := bad("file", "invalid_file", "%s.", err)
	switch {
	case errors.Is(err, documents.ErrTooLarge):
		r.Status, r.Code = http.StatusRequestEntityTooLarge, "file_too_large"
	case errors.Is(err, documents.ErrTooMany):
		r.Status, r.Code = http.StatusConflict, "too_many_files"
	case errors.Is(err, documents.ErrInUse):
		r.Status, r.Code, r.Param = http.StatusConflict, "file_in_use", "file_id"
	case errors.Is(err, documents.ErrNotFound):
		return unknown("file_not_found", "There is no such file.")
	case !errors.Is(err, documents.ErrForm) && !errors.Is(err, documents.ErrEmpty):
		return refused(err)
	}
	return r
}

// longDocument reports a document in the conversation of which the model was shown the beginning alone.
func (p past) longDocument() bool {
	return slices.ContainsFunc(p.messages, func(m models.Message) bool { return strings.Contains(m.Content, documents.Continues) })
}

// attachFiles gives the files of the messages to their thread, stores those that the request holds, and adds to each
// message what a model reads of them. docs are the documents of each message.
func (c *Chat) attachFiles(ctx context.Context, tx pgx.Tx, a Ask) (texts []string, docs [][]documents.Document, err error) {
	texts, docs = slices.Clone(a.Texts), make([][]documents.Document, len(a.Texts))
	for i, files := range a.Files {
		for _, f := range files {
			d, err := c.attachFile(ctx, tx, a, f)
			if err != nil {
				return nil, nil, refusedFile(err)
			}
			shown, err := documents.Shown(ctx, tx, d, mostExcerpt)
			if err != nil {
				return nil, nil, err
			}
			texts[i] = strings.TrimSpace(texts[i] + "\n\n" + shown)
			docs[i] = append(docs[i], d)
		}
	}
	return texts, docs, nil
}

// idsOf are the ids of the documents of messages.
func idsOf(docs [][]documents.Document) (ids []string) {
	for _, d := range slices.Concat(docs...) {
		ids = append(ids, d.ID)
	}
	return ids
}

// imagesWith are the images of each message, with those among its files, for a model that takes images. Of an image
// above the bounds the model reads name and type alone.
func (c *Chat) imagesWith(ctx context.Context, tx pgx.Tx, a Ask, docs [][]documents.Document) ([][]threads.Image, error) {
	images := make([][]threads.Image, len(a.Texts))
	copy(images, a.Images)
	if !c.takesImages(a) {
		return images, nil
	}
	left := int64(mostImageBytes)
	for i, list := range docs {
		for _, d := range list {
			if !slices.Contains(imageTypes(), d.ContentType) || len(images[i]) >= threads.MostImages ||
				d.Size > min(left, threads.MostImageSize) {
				continue
			}
			data, err := documents.Content(ctx, tx, d.ID)
			if err != nil {
				return nil, err
			}
			left -= d.Size
			images[i] = append(slices.Clip(images[i]), threads.Image{MediaType: d.ContentType, Data: data})
		}
	}
	return images, nil
}

// attachFile is the document of a file, which belongs to the thread from then on.
func (c *Chat) attachFile(ctx context.Context, tx pgx.Tx, a Ask, f File) (documents.Document, error) {
	if f.ID != "" {
		return documents.Attach(ctx, tx, a.principal(), a.thread, f.ID)
	}
	return documents.AddOnce(ctx, tx, documents.Upload{
		Name: f.Name, ContentType: f.ContentType, Content: f.Content, ThreadID: a.thread, TraceID: string(a.TraceID),
		By: a.principal(), MaxBytes: c.DocumentBytes,
	})
}
