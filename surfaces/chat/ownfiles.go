package chat

import (
	"encoding/json"
	"net/http"
	"strconv"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/trace"
)

// filePurpose is what a file is for: purposes are not stored.
const filePurpose = "user_data"

// mostListed bounds a page of files; OpenAI's bound is the same.
const mostListed = 10_000

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

// fileOf is a document as a file object.
func fileOf(d documents.Document) file {
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

func (c *Chat) listFiles(w http.ResponseWriter, r *http.Request, _ trace.ID) error {
	who, err := c.principal(r)
	if err != nil {
		return err
	}
	query := r.URL.Query()
	limit, order := mostListed, query.Get("order")
	if given := query.Get("limit"); given != "" {
		if limit, err = strconv.Atoi(given); err != nil || limit < 1 || limit > mostListed {
			return bad("limit", "invalid_value", "limit is a number from 1 to %d.", mostListed)
		}
	}
	switch {
	case order != "" && order != "asc" && order != "desc":
		return bad("order", "invalid_value", "order must be asc or desc.")
	case query.Get("purpose") != "" && query.Get("purpose") != filePurpose:
		return bad("purpose", "unsupported_value", "Purposes are not stored: each file is %s.", filePurpose)
	}
	got, err := documents.ListOwn(r.Context(), c.Front, who, query.Get("after"), order == "asc", limit+1)
	if err != nil {
		return err
	}
	page := filePage{Object: "list", Data: []file{}, HasMore: len(got) > limit}
	for _, d := range got[:min(len(got), limit)] {
		page.Data = append(page.Data, fileOf(d))
	}
	if n := len(page.Data); n > 0 {
		page.FirstID, page.LastID = &page.Data[0].ID, &page.Data[n-1].ID
	}
	return writeFile(w, page)
}

func (c *Chat) getFile(w http.ResponseWriter, r *http.Request, _ trace.ID) error {
	d, err := c.ownFile(r)
	if err != nil {
		return err
	}
	return writeFile(w, fileOf(d))
}

func (c *Chat) sendFile(w http.ResponseWriter, r *http.Request, _ trace.ID) error {
	d, err := c.ownFile(r)
	if err != nil {
		return err
	}
	content, err := documents.Content(r.Context(), c.Front, d.ID)
	if err != nil {
		return refusedFile(err)
	}
	if err := documents.Send(w, d, content); err != nil {
		c.Logger.DebugContext(r.Context(), "answer not sent", "error", err)
	}
	return nil
}

func (c *Chat) deleteFile(w http.ResponseWriter, r *http.Request, _ trace.ID) error {
	who, err := c.principal(r)
	if err != nil {
		return err
	}
	id := r.PathValue("id")
	err = c.intake.Do(r.Context(), c.Front, "documents of "+who.Owner+" "+who.Proof, func(tx pgx.Tx) error {
		d, err := documents.DeleteOwn(r.Context(), tx, who, id)
		id = d.ID
		return err
	})
	if err != nil {
		return refusedFile(err)
	}
	return writeFile(w, map[string]any{"id": id, "object": "file", "deleted": true})
}

// ownFile is the caller's document that a request names.
func (c *Chat) ownFile(r *http.Request) (documents.Document, error) {
	who, err := c.principal(r)
	if err != nil {
		return documents.Document{}, err
	}
	d, err := documents.GetOwn(r.Context(), c.Front, who, r.PathValue("id"))
	if err != nil {
		return d, refusedFile(err)
	}
	return d, nil
}

func writeFile(w http.ResponseWriter, answer any) error {
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(answer)
}
