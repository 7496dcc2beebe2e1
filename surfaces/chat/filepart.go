package chat

import (
	"encoding/base64"
	"strings"

	"github.com/lanekeeper/lanekeeper/documents"
)

// File is a file of a message: the id of a document, or the file itself.
type File struct {
	ID          string
	Name        string
	ContentType string // as the client claims
	Content     []byte
}

// filePart names a file in a part of a message: file in chat completions, the part itself in responses.
type filePart struct {
	FileID   string `json:"file_id"`
	Data     string `json:"file_data"` // base64, or a data: URL of base64
	Filename string `json:"filename"`
}

// file is the part that says which file is meant.
func (p wirePart) file() filePart {
	if p.Type == "file" {
		return p.File
	}
	return filePart{FileID: p.FileID, Data: p.Data, Filename: p.Filename}
}

// check returns what is wrong with a part; "" for one that may be read.
func (p filePart) check() string {
	switch {
	case p.FileID == "" && p.Data == "":
		return "A file comes by its id, which POST /v1/files gives, or as file_data, with a filename."
	case p.FileID != "" && p.Data != "":
		return "A file has a file_id or file_data, not both."
	}
	return ""
}

// read decodes the file of a part, of at most so many bytes.
func (p filePart) read(most int64) (File, error) {
	if p.FileID != "" {
		return File{ID: p.FileID}, nil
	}
	f, encoded := File{Name: p.Filename}, p.Data
	if rest, isURL := strings.CutPrefix(p.Data, "data:"); isURL {
		head, body, _ := strings.Cut(rest, ",")
		kind, inBase64 := strings.CutSuffix(head, ";base64")
		if !inBase64 {
			return f, bad("file", "invalid_file", "file_data has the form data:application/pdf;base64,…")
		}
		encoded, f.ContentType = body, kind
	}
	if int64(base64.StdEncoding.DecodedLen(len(encoded))) > most+2 {
		return f, documents.TooLarge(most)
	}
	var err error
	if f.Content, err = base64.StdEncoding.DecodeString(encoded); err != nil {
		return f, bad("file", "invalid_file", "file_data must be base64.")
	}
	switch {
	case len(f.Content) == 0:
		return f, documents.ErrEmpty
	case int64(len(f.Content)) > most:
		return f, documents.TooLarge(most)
	}
	return f, nil
}

// readFiles decodes the files of a new message. param is the message's place in the request.
func (c *Chat) readFiles(parts []filePart, param string) (files []File, err error) {
	if len(parts) > mostFiles {
		return nil, bad(param, "too_many_files", "A message has at most %d files.", mostFiles)
	}
	for _, p := range parts {
		f, err := p.read(c.DocumentBytes)
		if err != nil {
			return nil, refusedFile(err)
		}
		files = append(files, f)
	}
	return files, nil
}
