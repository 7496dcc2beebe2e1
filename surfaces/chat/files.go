package chat

import (
	"encoding/json"
	"errors"
	"net/http"
	"strconv"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// FilesHandler serves POST /v1/files: a document of the visitor, for a message that names its id.
func (c *Chat) FilesHandler() http.Handler { return c.handler(c.upload) }

// upload stores a document of the visitor. It creates the visitor if the request has no token. The document belongs to
// a thread only if the header names a thread of the visitor.
func (c *Chat) upload(w http.ResponseWriter, r *http.Request, id trace.ID) error {
	secret, created, err := c.visitorToken(r)
	if err != nil {
		return err
	}
	if created { // a client may invent visitors
		err = c.allow(r, c.Visitor(r), "", "")
	} else {
		err = c.allowUpload(r, c.Visitor(r), secret)
	}
	if err != nil {
		return err
	}
	u, err := documents.ReadForm(r, c.DocumentBytes, false)
	if err != nil {
		return fileError(err)
	}
	caller := (&UserMessage{Owner: c.Visitor(r), Secret: secret}).principal()
	u.By, u.TraceID = caller, string(id)
	if name := r.Header.Get(threadHeader); name != "" {
		thread, known, err := threads.Resolve(r.Context(), c.Front, caller, name)
		if err != nil {
			return threadError(err)
		}
		if known { // otherwise the message that names the file attaches it to its thread
			u.ThreadID = thread
		}
	}
	var d documents.Document
	err = c.keyedTx.Do(r.Context(), c.Front, "documents of "+caller.Owner+" "+caller.Proof, func(tx pgx.Tx) (err error) {
		d, err = documents.Add(r.Context(), tx, u)
		return err
	})
	if err != nil {
		return fileError(err)
	}
	if created {
		w.Header().Set(visitorHeader, secret)
	}
	return writeFileJSON(w, newFile(d))
}

// fileError converts an error of a document to a *Refusal for the visitor.
func fileError(err error) error {
	r := badRequest("file", "invalid_file", "%s.", err)
	switch {
	case errors.Is(err, documents.ErrTooLarge):
		r.Status, r.Code = http.StatusRequestEntityTooLarge, "file_too_large"
	case errors.Is(err, documents.ErrTooMany):
		r.Status, r.Code = http.StatusConflict, "too_many_files"
	case errors.Is(err, documents.ErrInUse):
		r.Status, r.Code, r.Param = http.StatusConflict, "file_in_use", "file_id"
	case errors.Is(err, documents.ErrNotFound):
		return notFound("file_not_found", "There is no such file.")
	case !errors.Is(err, documents.ErrForm) && !errors.Is(err, documents.ErrEmpty):
		return threadError(err)
	}
	return r
}

// filePurpose is the purpose of every file: purposes are not stored.
const filePurpose = "user_data"

// maxListedFiles bounds a page of files; OpenAI's bound is the same.
const maxListedFiles = 10_000

// file is OpenAI's file object.
type file struct {
	ID       string `json:"id"`
	Object   string `json:"object"`
	Bytes    int64  `json:"bytes"`
	Created  int64  `json:"created_at"`
	Expires  *int64 `json:"expires_at,omitempty"` // of an upload that no message uses
	Filename string `json:"filename"`
	Purpose  string `json:"purpose"`
	Status   string `json:"status"`
}

// newFile converts a document to a file object.
func newFile(d documents.Document) file {
	f := file{
		ID: d.ID, Object: "file", Bytes: d.Size, Created: d.CreatedAt.Unix(), Filename: d.Name, Purpose: filePurpose,
		Status: "processed",
	}
	if d.ExpiresAt != nil {
		at := d.ExpiresAt.Unix()
		f.Expires = &at
	}
	return f
}

// filePage is OpenAI's list of files.
type filePage struct {
	Object  string  `json:"object"`
	Data    []file  `json:"data"`
	FirstID *string `json:"first_id"`
	LastID  *string `json:"last_id"`
	HasMore bool    `json:"has_more"`
}

// FileListHandler serves GET /v1/files: the caller's files.
func (c *Chat) FileListHandler() http.Handler { return c.handler(c.listFiles) }

// FileHandler serves GET /v1/files/{id}.
func (c *Chat) FileHandler() http.Handler { return c.handler(c.getFile) }

// FileContentHandler serves GET /v1/files/{id}/content.
func (c *Chat) FileContentHandler() http.Handler { return c.handler(c.sendFile) }

// DeleteFileHandler serves DELETE /v1/files/{id}. A file that a message or a flow uses stays: 409.
func (c *Chat) DeleteFileHandler() http.Handler { return c.handler(c.deleteFile) }

// listFiles lists the caller's own documents, newest first unless the query asks for order=asc.
func (c *Chat) listFiles(w http.ResponseWriter, r *http.Request, _ trace.ID) error {
	caller, err := c.principal(r)
	if err != nil {
		return err
	}
	query := r.URL.Query()
	limit, order := maxListedFiles, query.Get("order")
	if raw := query.Get("limit"); raw != "" {
		if limit, err = strconv.Atoi(raw); err != nil || limit < 1 || limit > maxListedFiles {
			return badRequest("limit", "invalid_value", "limit is a number from 1 to %d.", maxListedFiles)
		}
	}
	switch {
	case order != "" && order != "asc" && order != "desc":
		return badRequest("order", "invalid_value", "order must be asc or desc.")
	case query.Get("purpose") != "" && query.Get("purpose") != filePurpose:
		return badRequest("purpose", "unsupported_value", "Purposes are not stored: each file is %s.", filePurpose)
	}
	docs, err := documents.ListOwn(r.Context(), c.Front, caller, query.Get("after"), order == "asc", limit+1)
	if err != nil {
		return fileError(err)
	}
	page := filePage{Object: "list", Data: []file{}, HasMore: len(docs) > limit}
	for _, d := range docs[:min(len(docs), limit)] {
		page.Data = append(page.Data, newFile(d))
	}
	if n := len(page.Data); n > 0 {
		page.FirstID, page.LastID = &page.Data[0].ID, &page.Data[n-1].ID
	}
	return writeFileJSON(w, page)
}

func (c *Chat) getFile(w http.ResponseWriter, r *http.Request, _ trace.ID) error {
	d, err := c.ownFile(r)
	if err != nil {
		return err
	}
	return writeFileJSON(w, newFile(d))
}

func (c *Chat) sendFile(w http.ResponseWriter, r *http.Request, _ trace.ID) error {
	d, err := c.ownFile(r)
	if err != nil {
		return err
	}
	if err := documents.WriteAttachment(r.Context(), w, c.Front, d); err != nil {
		return fileError(err)
	}
	return nil
}

func (c *Chat) deleteFile(w http.ResponseWriter, r *http.Request, _ trace.ID) error {
	caller, err := c.principal(r)
	if err != nil {
		return err
	}
	id := r.PathValue("id")
	err = c.keyedTx.Do(r.Context(), c.Front, "documents of "+caller.Owner+" "+caller.Proof, func(tx pgx.Tx) error {
		d, err := documents.DeleteOwn(r.Context(), tx, caller, id)
		id = d.ID
		return err
	})
	if err != nil {
		return fileError(err)
	}
	return writeFileJSON(w, map[string]any{"id": id, "object": "file", "deleted": true})
}

// ownFile returns the caller's document of the request's path.
func (c *Chat) ownFile(r *http.Request) (documents.Document, error) {
	caller, err := c.principal(r)
	if err != nil {
		return documents.Document{}, err
	}
	d, err := documents.GetOwn(r.Context(), c.Front, caller, r.PathValue("id"))
	if err != nil {
		return d, fileError(err)
	}
	return d, nil
}

func writeFileJSON(w http.ResponseWriter, answer any) error {
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(answer)
}
